"""The Docker engine as the boxes see it: what it can do here, its images, and every failure with its fix.

A container's memory cgroup as its host has it, where engine and worker share a machine.

Version 1 counts the buffers of sockets only where a limit of their own is set, and no current runtime sets it
(`KernelMemoryTCP` is accepted and ignored), so it is written here: code could else fill gigabytes of the host with
unread datagrams, whatever its container's memory is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.sandbox.protocol import NoSuchImage, SandboxError, SandboxLost

if TYPE_CHECKING:
    from aiodocker import Docker


CALL_DEADLINE_S = 20.0
"""Deadline of one call to the engine; a loaded machine starts a container in a few seconds."""
IMAGE_NAME = re.compile(r"\w[\w.-]*(:\d+)?(/\w[\w.-]*)*(:\w[\w.-]*)?(@\w+:[0-9a-f]+)?", re.ASCII)
UNREACHABLE = (
    "no Docker engine answers: install one (`apt-get install docker.io`, or `scripts/setup-docker` on Debian), "
    "start it (`systemctl start docker`), or set DOCKER_HOST to its address; boxes without images need none: "
    "sandbox.backend=bwrap, or --backend bwrap of `penstock data check`"
)


class NoSuchProgram(SandboxError):
    """The image lacks the program that a container was to run."""


@dataclass(frozen=True, slots=True)
class DockerEngine:
    """The abilities of one engine, as it reported them."""

    version: str
    api_version: str
    machine: str
    """Architecture in the words of `platform.machine()`."""
    cgroup_version: str
    runtimes: tuple[str, ...]
    default_runtime: str
    limits_memory: bool
    limits_pids: bool
    limits_cpu: bool
    remaps_uids: bool
    """Rootless or with remapped users: only uids below 65536 exist in its containers."""


@dataclass(frozen=True, slots=True)
class DockerImage:
    name: str
    image_id: str
    volumes: tuple[str, ...]
    """Paths that the image declares as volumes: the engine would make them writable folders of the host's disk."""
    user: str = ""
    workdir: str = "/"
    entrypoint: tuple[str, ...] = ()
    written_bytes: int = 0
    """Bytes that the boxes of a snapshot's image have written, from the first of them on."""


def connect(api_version: str = "auto") -> Docker:
    """A client, as DOCKER_HOST or the current context says; inside a running loop. Raises `SandboxError`."""
    try:
        import aiodocker
    except ImportError as error:
        raise SandboxError("the `aiodocker` package is missing: `pip install 'penstock[docker]'`") from error
    try:
        return aiodocker.Docker(api_version=api_version)
    except (ValueError, AssertionError) as error:  # no socket where one is looked for
        raise SandboxError(f"docker: {UNREACHABLE}") from error


@contextlib.asynccontextmanager
async def calling(doing: str, deadline_s: float | None = None) -> AsyncIterator[None]:
    """Around calls to the engine. Raises `SandboxError` for whatever they raise, and past the deadline."""
    deadline_s = CALL_DEADLINE_S if deadline_s is None else deadline_s
    try:
        async with asyncio.timeout(deadline_s):
            with translating(doing):
                yield
    except TimeoutError as error:
        raise SandboxError(f"docker: {doing}: the engine did not answer in {deadline_s:g} s") from error


@contextlib.contextmanager
def translating(doing: str) -> Iterator[None]:
    """Raises `SandboxError` for what the client raises, but for `TimeoutError`: the deadline is the caller's."""
    import aiodocker
    import aiohttp

    try:
        yield
    except TimeoutError:
        raise
    except aiodocker.DockerError as error:
        raise _failure(doing, error) from error
    except (aiohttp.ClientError, OSError) as error:
        raise SandboxError(f"docker: {doing}: {_unreachable(error)}") from error


def _failure(doing: str, error: Any) -> SandboxError:
    text = str(error.message)
    if error.status == 900:  # aiodocker's own: no connection
        return SandboxError(f"docker: {doing}: {_unreachable(error)}")
    if "executable file not found" in text or "finding executable" in text:
        return NoSuchProgram(f"docker: {doing}: {text}")
    if "No such image" in text:
        return NoSuchImage(f"docker: {doing}: {text}: `docker pull` it, build it, or name another (sandbox.image)")
    if "No such container" in text:
        return SandboxLost(f"docker: {doing}: {text}")
    return SandboxError(f"docker: {doing}: {text}")


def _unreachable(error: BaseException | None) -> str:
    """Walks the causes: clients wrap the system's error more than once."""
    first = error
    while error is not None:
        if isinstance(error, PermissionError):
            return (
                "this user may not speak to the Docker engine: `usermod -aG docker $USER` and log in again, or use"
                " rootless Docker"
            )
        error = error.__cause__ or error.__context__
    return f"{UNREACHABLE} ({first})"


async def survey(client: Docker) -> DockerEngine:
    """Raises `SandboxError` where no engine answers."""
    async with calling("asking the engine what it can do"):
        version = await client.version()
        info = await client.system.info()
    security = " ".join(info.get("SecurityOptions") or ())
    return DockerEngine(
        version=version["Version"],
        api_version="v" + version["ApiVersion"],
        machine=info.get("Architecture", ""),
        cgroup_version=str(info.get("CgroupVersion", "1")),
        runtimes=tuple(sorted(info.get("Runtimes") or ())),
        default_runtime=info.get("DefaultRuntime", ""),
        limits_memory=bool(info.get("MemoryLimit")),
        limits_pids=bool(info.get("PidsLimit")),
        limits_cpu=bool(info.get("CpuCfsQuota")),
        remaps_uids="name=rootless" in security or "name=userns" in security,
    )


async def find_image(client: Docker, name: str) -> DockerImage:
    """Raises `SandboxError` where the engine does not have it: pulling is the user's decision."""
    if not IMAGE_NAME.fullmatch(name):  # it becomes a part of a path: `../containers/NAME` would ask for another thing
        raise NoSuchImage(f"docker: {name[:100]!r} is no image's name: REGISTRY/NAME:TAG, NAME@sha256:… or an id is")
    async with calling(f"looking for image {name}"):
        details = await client.images.inspect(name)
    config = details.get("Config") or {}
    return DockerImage(
        name,
        details["Id"],
        tuple(config.get("Volumes") or ()),
        user=config.get("User") or "",
        workdir=config.get("WorkingDir") or "/",
        entrypoint=tuple(config.get("Entrypoint") or ()),
    )


def require_runtime(engine: DockerEngine, runtime: str | None) -> None:
    if runtime is not None and runtime not in engine.runtimes:
        raise SandboxError(
            f"docker: the engine has no runtime {runtime} (it has {', '.join(engine.runtimes)}): install it, add it to "
            "`runtimes` in /etc/docker/daemon.json and restart the engine"
        )


def require_memory_limit(engine: DockerEngine, allowed: bool) -> None:
    """Raises `SandboxError` where a container's memory has no limit, unless that is `allowed`."""
    if not engine.limits_memory and not allowed:
        raise SandboxError(
            "docker: this engine cannot limit a container's memory (a rootless one needs a delegated cgroup v2: "
            "https://rootlesscontaine.rs/getting-started/common/cgroup2/), or accept it with "
            "sandbox.memory_unbounded: true"
        )


ROOT = Path("/sys/fs/cgroup")
_SOCKETS = "memory.kmem.tcp.limit_in_bytes"


def limits_socket_memory(cgroup_version: str) -> bool:
    """True if buffers of sockets count: always in version 2; in version 1 if this process may set the limit."""
    return cgroup_version != "1" or os.access(ROOT / "memory" / _SOCKETS, os.W_OK)


def limit_socket_memory(container_id: str, memory_bytes: int) -> bool:
    """Before the container opens its first socket. False if the file is missing or not writable."""
    for file in _files(container_id, f"memory/{{}}/{_SOCKETS}"):
        try:
            file.write_text(str(memory_bytes), encoding="ascii")
        except OSError:
            continue
        return True
    return False


def oom_counters(container_id: str) -> Iterator[Path]:
    """Files that may count the container's out-of-memory kills, where engine and worker share a machine."""
    return _files(container_id, "memory/{}/memory.oom_control", "{}/memory.events")


def _files(container_id: str, *patterns: str) -> Iterator[Path]:
    """Paths in both groups that the engine's cgroup drivers may put a container into."""
    groups = (f"docker/{container_id}", f"system.slice/docker-{container_id}.scope")
    yield from (ROOT / pattern.format(group) for pattern in patterns for group in groups)
