"""Settings of sandboxes and of sandbox servers (`penstock sandbox`)."""

from __future__ import annotations

import posixpath
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator

from penstock.sandbox.protocol import OWN_FOLDERS

DEFAULT_IMAGE = "default"
"""The backend's own default image, as a key of `warm`."""


class CallerConfig(BaseModel):
    """One further token of a sandbox server, and how much its holder may have at once."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    token_env: str = Field(min_length=1, description="Environment variable of the server that holds the bearer token.")
    max_boxes: int = Field(8, gt=0, description="Sessions open and waited for at once; further ones are refused (429).")
    max_calls: int = Field(16, gt=0, description="Calls running at once; further ones are refused (429).")


class SandboxServerConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    warm: dict[str, PositiveInt] = Field(
        default_factory=dict,
        description="Boxes kept ready by image, as {default: 4}; part of `max_boxes`, given up for another image.",
    )
    queue_timeout_s: float = Field(
        60.0, gt=0, le=120, description="How long a session waits for a free box (then 503)."
    )
    callers: dict[str, CallerConfig] = Field(
        default_factory=dict, description="Further tokens, by the name of their holder."
    )


class OwnLimitsConfig(BaseModel):
    """The most that one session may ask for itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_mb: int = Field(8192, gt=0, description="Most memory of a box whose task asks for its own.")
    cpus: float = Field(8.0, gt=0, description="Most CPU share of a box whose task asks for its own.")
    storage_mb: int = Field(
        10240, gt=0, description="Most that a box with an own root writes to its image's file system."
    )


class ManagedConfig(BaseModel):
    """Boxes of a provider: how long they live, what they may reach, what they may cost."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ttl_s: int | None = Field(
        None, ge=60, description="The provider ends a box at this age; none: an episode's deadline and 300 s."
    )
    network: bool = Field(False, description="Boxes may reach the internet; else the provider is asked to forbid it.")
    namespace: str | None = Field(None, description="Kubernetes: where the pods are; none: the kubeconfig's own.")
    start_timeout_s: float = Field(
        300.0, gt=0, description="From the request for a box until it runs; an image may have to be fetched."
    )
    retry_for_s: float = Field(
        120.0, ge=0, description="How long a request is tried again that the provider answers with 429, 5xx or nothing."
    )
    price_per_hour: float = Field(
        0.0, ge=0, description="Of one box, in the unit of `cost_limit`: no provider's API reports it."
    )
    cost_limit: float | None = Field(
        None, gt=0, description="What the boxes of one process may cost; then it starts no further one."
    )

    @model_validator(mode="after")
    def _limit_has_a_price(self) -> ManagedConfig:
        if self.cost_limit is not None and not self.price_per_hour:
            raise ValueError("cost_limit without a price_per_hour limits nothing: set what one box costs an hour")
        return self


class SandboxConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: Literal["bwrap", "docker", "remote", "daytona", "e2b", "kubernetes", "modal", "unsafe_subprocess"] = Field(
        "bwrap", description="Where tool code runs. Never falls back to a weaker one by itself."
    )
    url: str | None = Field(None, description="Of a `penstock sandbox` server; needed by backend remote.")
    image: str = Field(
        "python:3.12-slim",
        description="Image of a box, unless a session names its own: docker, daytona, kubernetes,"
        " modal; of e2b a template.",
    )
    runtime: str | None = Field(
        None,
        description="Backend docker: OCI runtime by the engine's name for it, as `runsc` (gVisor); kubernetes: a"
        " RuntimeClass; modal: `gvisor` or `vm`. None: the default.",
    )
    memory_mb: int = Field(256, gt=0, description="Memory of one box, all its processes and /tmp together.")
    memory_unbounded: bool = Field(
        False, description="Allow boxes where no limit for a whole box's memory can be had; else the start is refused."
    )
    pids: int = Field(64, gt=0, description="Processes and threads in one box.")
    cpus: float = Field(1.0, gt=0, description="CPU share of one box.")
    cpu_s: int = Field(30, gt=0, description="CPU seconds of one process in a box.")
    run_timeout_s: float = Field(5.0, gt=0, description="Wall-clock limit of one run.")
    output_bytes: int = Field(65536, gt=0, description="Output of one run; more is cut and said so.")
    tmp_mb: int = Field(64, gt=0, description="Size of the private /tmp.")
    own_root: bool = Field(
        False,
        description="Sessions may have a file system of their own to write, of an image as its root user, as tasks of"
        " Harbor need it. A weaker wall.",
    )
    own_limits: OwnLimitsConfig = OwnLimitsConfig()
    folders: dict[str, str] = Field(
        default_factory=dict,
        description="Folders of this machine that every box sees, read-only: path in the box, as /agents → path here.",
    )
    max_boxes: int = Field(64, gt=0, description="Boxes open at once; further sessions wait.")
    snapshot_mb: int = Field(
        4096,
        gt=0,
        description="What the snapshots of one process may hold together: copied folders, and what docker's boxes with"
        " an own root wrote.",
    )
    on_lost: Literal["replay", "restart"] = Field(
        "replay", description="A resumed episode whose box is gone: run its tool calls again, or the whole episode."
    )
    server: SandboxServerConfig = SandboxServerConfig()
    managed: ManagedConfig = ManagedConfig()

    @field_validator("folders")
    @classmethod
    def _check_folders(cls, folders: dict[str, str]) -> dict[str, str]:
        for inside in folders:
            if posixpath.normpath(inside) != inside or not inside.startswith("/") or inside.startswith("//"):
                raise ValueError(f"{inside!r} is not an absolute, normal path: choose one such as /agents")
            system = {"", "bin", "dev", "etc", "lib", "lib64", "proc", "root", "run", "sbin", "sys", "tmp", "usr"}
            if inside.split("/")[1] in system:
                raise ValueError(f"{inside!r} is a box's own: choose another path, such as /agents")
        return folders

    @model_validator(mode="after")
    def _own_folders_are_free(self) -> SandboxConfig:
        conflicts = [inside for inside in self.folders if self.own_root and f"/{inside.split('/')[1]}" in OWN_FOLDERS]
        if conflicts:
            raise ValueError(f"folders: {conflicts[0]} is a box's own to write if own_root is set: choose another path")
        return self
