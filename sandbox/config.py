"""Settings of sandboxes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.sandbox.server_config import SandboxServerConfig


class SandboxConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: Literal["bwrap", "docker", "remote", "unsafe_subprocess"] = Field(
        "bwrap", description="Where tool code runs. Never falls back to a weaker one by itself."
    )
    url: str | None = Field(None, description="Of a `penstock sandbox` server; needed by backend remote.")
    image: str = Field(
        "python:3.12-slim", description="Backend docker: image of a box, unless a session names its own."
    )
    runtime: str | None = Field(
        None,
        description="Backend docker: OCI runtime by the engine's name for it, as `runsc` (gVisor); none: its default.",
    )
    memory_mb: int = Field(256, gt=0, description="Memory of one box, all its processes and /tmp together.")
    pids: int = Field(64, gt=0, description="Processes and threads in one box.")
    cpus: float = Field(1.0, gt=0, description="CPU share of one box.")
    cpu_s: int = Field(30, gt=0, description="CPU seconds of one process in a box.")
    run_timeout_s: float = Field(5.0, gt=0, description="Wall-clock limit of one run.")
    output_bytes: int = Field(65536, gt=0, description="Output of one run; more is cut and said so.")
    tmp_mb: int = Field(64, gt=0, description="Size of the private /tmp.")
    max_boxes: int = Field(64, gt=0, description="Boxes open at once; further sessions wait.")
    on_lost: Literal["replay", "restart"] = Field(
        "replay", description="A resumed episode whose box is gone: run its tool calls again, or the whole episode."
    )
    server: SandboxServerConfig = SandboxServerConfig()
