"""Boxes made by a Docker engine: a container per session, read-only, without network or capabilities.

    worker ──HTTP──► engine ──► container: driver (pid 1) ─► interpreter, shell, commands

The driver is the one that bubblewrap boxes have, run by the image's own python3; an image without one is served by a
program execution of the engine's per call (`plain`).
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.sandbox.box import Box
from penstock.sandbox.bundle import driver_command_from_stdin, driver_sources
from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.docker.box import DockerBox
from penstock.sandbox.docker.container import Container
from penstock.sandbox.docker.engine import (
    Engine,
    Image,
    NoSuchProgram,
    connect,
    find_image,
    require_runtime,
    survey,
)
from penstock.sandbox.docker.leftovers import clear_away, labels_of
from penstock.sandbox.docker.plain import PLAIN_COMMAND, PlainSession
from penstock.sandbox.docker.socket_memory import limits_socket_memory
from penstock.sandbox.docker.spec import container_spec
from penstock.sandbox.maker import QUEUE_TIMEOUT_S, DriverSandbox
from penstock.sandbox.protocol import SandboxError, Session
from penstock.sandbox.seccomp import build_filter
from penstock.sandbox.session import DriverSession

if TYPE_CHECKING:
    from aiodocker import Docker

logger = logging.getLogger(__name__)

PYTHON = "python3"
T = TypeVar("T")
Launch = Callable[[], Awaitable[DockerBox | Container]]


class DockerSandbox(DriverSandbox):
    """Maker of containers for one process. `containment` says in words which walls stand."""

    def __init__(self, config: SandboxConfig, owner: str, queue_timeout_s: float = QUEUE_TIMEOUT_S) -> None:
        """Clears away what a killed process of the same `owner` left, then proves that engine, image and runtime exist.

        Raises:
            SandboxError: one does not, with the mend.
        """
        super().__init__(config, queue_timeout_s)
        self._owner = owner
        self._images: dict[str, Image] = {}
        self._plain_images: set[str] = set()
        self._engine, image = _now(self._survey())
        self._images[config.image] = image
        self._filter = build_filter(self._engine.machine)
        self._driver = driver_sources()
        self._client: Docker | None = None
        self.containment, weak = describe(self._engine, config, self._filter is not None)
        logger.log(logging.WARNING if weak else logging.INFO, "sandbox: %s", self.containment)

    async def _survey(self) -> tuple[Engine, Image]:
        client = connect()
        try:
            engine = await survey(client)
            require_runtime(engine, self.config.runtime)
            if count := await clear_away(client, self._owner):
                logger.warning("sandbox: removed %d containers that an earlier process of %s left", count, self._owner)
            return engine, await find_image(client, self.config.image)
        finally:
            await client.close()

    async def start(self, label: str, *, image: str | None = None) -> Session:  # type: ignore[override]
        slot = await self._free_slot()
        session_id = secrets.token_hex(12)

        def release() -> None:
            self._sessions.pop(session_id, None)
            self._slots.put_nowait(slot)

        try:
            launch = await self._launcher(image or self.config.image, slot, labels_of(self._owner, label, session_id))
            first = await launch()
        except BaseException:
            release()
            raise
        kind: Any = DriverSession if isinstance(first, DockerBox) else PlainSession
        session = kind(session_id, self.config, _first_then(first, launch), release)
        self._sessions[session_id] = session
        await session.open()
        return session

    async def _launcher(self, image_name: str, slot: int, labels: dict[str, str]) -> Launch:
        self._client = self._client or connect(self._engine.api_version)
        image = self._images.get(image_name) or await find_image(self._client, image_name)
        self._images[image_name] = image

        async def start(command: list[str]) -> Container:
            assert self._client is not None
            return await Container.start(
                self._client, container_spec(self.config, self._engine, image, command, slot=slot, labels=labels)
            )

        async def launch() -> DockerBox | Container:
            if image.image_id not in self._plain_images:
                try:
                    return await DockerBox.open(await start(self._driver_command()), self._driver)
                except NoSuchProgram:
                    self._plain_images.add(image.image_id)
            try:
                return await start(PLAIN_COMMAND)
            except NoSuchProgram as error:
                raise SandboxError(f"image {image_name} has neither python3 (3.9 or newer) nor sh: {error}") from error

        return launch

    async def close(self) -> None:
        await super().close()
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _launch(self, slot: int) -> Box:
        raise NotImplementedError

    def _driver_command(self) -> list[str]:
        settings: dict[str, object] = {
            "boxed": True,
            "pipes": True,
            "counts_oom_kills": True,
            "cpu_s": self.config.cpu_s,
            "output_bytes": self.config.output_bytes,
        }
        if self._filter is not None:
            settings["filter"] = base64.b64encode(self._filter).decode("ascii")
        if not self._engine.limits_memory:
            settings["address_space"] = self.config.memory_mb << 20
        if not self._engine.limits_pids:
            settings["processes"] = self.config.pids
        return driver_command_from_stdin(PYTHON, settings)


def _first_then(first: T, launch: Callable[[], Awaitable[T]]) -> Callable[[], Awaitable[T]]:
    """`launch`, but that its first call hands out what was launched already."""
    waiting = [first]

    async def next_one() -> T:
        return waiting.pop() if waiting else await launch()

    return next_one


def describe(engine: Engine, config: SandboxConfig, filtered: bool) -> tuple[str, bool]:
    """(Which walls stand, in words; whether one is missing)"""
    runtime = config.runtime or engine.default_runtime
    walls = [f"docker {engine.version} ({runtime}): no network, read-only root, private /tmp, no capabilities"]
    walls.append("the engine's seccomp profile" + (" and ours" if filtered else ""))
    walls.append("a uid per box" + (", of remapped users" if engine.remaps_uids else ""))
    missing = []
    if not engine.limits_memory:
        missing.append("memory is limited per process, not per box")
    if not engine.limits_pids:
        missing.append("processes are limited per uid")
    if not engine.limits_cpu:
        missing.append("CPU share is not limited")
    if not limits_socket_memory(engine.cgroup_version):
        missing.append("buffers of sockets are not limited (cgroup v1, and this process may not write there)")
    if missing:
        walls.append(f"missing here: {', '.join(missing)}")
    else:
        walls.append(f"cgroup v{engine.cgroup_version} for memory, processes and CPU")
    return "; ".join(walls), bool(missing)


def _now(work: Coroutine[Any, Any, T]) -> T:
    """Its result, from code that may itself be called inside a running loop. `work` has deadlines of its own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
