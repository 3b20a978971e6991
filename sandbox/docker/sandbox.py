"""Boxes made by a Docker engine: a container per session, read-only, without network or capabilities.

    worker ──HTTP──► engine ──► container: driver (pid 1) ─► interpreter, shell, commands

The driver is the one that bubblewrap boxes have, run by the image's own python3. An image without one is served by an
`ExecSession`: one program execution of the engine's per call.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.sandbox.box import Box
from penstock.sandbox.bundle import command_from_stdin, line_of
from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.docker.container import Container, ContainerBox
from penstock.sandbox.docker.engine import (
    DockerEngine,
    DockerImage,
    NoSuchProgram,
    connect,
    find_image,
    limits_socket_memory,
    require_memory_limit,
    require_runtime,
    survey,
)
from penstock.sandbox.docker.exec_session import KEEPER_COMMAND, ExecSession
from penstock.sandbox.docker.orphans import clear_away, labels_of
from penstock.sandbox.docker.snapshot_images import SnapshotImages, is_snapshot
from penstock.sandbox.docker.spec import container_spec, keeper_of
from penstock.sandbox.limited import LimitedSandbox, SessionSlot
from penstock.sandbox.protocol import NoSuchImage, SandboxError, Session, UnmetNeeds
from penstock.sandbox.seccomp import build_filter
from penstock.sandbox.session import DriverSession
from penstock.sandbox.snapshots import TMP, BoxCopy, copy_folders

if TYPE_CHECKING:
    from aiodocker import Docker


logger = logging.getLogger(__name__)
PYTHON = "python3"


class DockerSandbox(LimitedSandbox):
    """Starts containers for one process. `containment` describes the active walls."""

    def __init__(self, config: SandboxConfig, owner: str) -> None:
        """Clears away what a killed process of the same `owner` left, then proves that engine, image and runtime exist.

        Raises:
            SandboxError: one does not; the message names the fix.
        """
        super().__init__(config)
        self._owner = owner
        self._images: dict[str, DockerImage] = {}
        self._without_python: set[str] = set()
        with ThreadPoolExecutor(1) as thread:  # a loop may run in this one; the calls have deadlines
            self._engine, image = thread.submit(asyncio.run, self._survey()).result()
        self._images[config.image] = image
        self._filter = build_filter(self._engine.machine)
        self._driver = line_of()
        self._client: Docker | None = None
        self._snapshot_images = SnapshotImages(self._connected)
        self._sweeps: set[asyncio.Task[None]] = set()
        self.containment, weak = describe(self._engine, config, self._filter is not None)
        logger.log(logging.WARNING if weak else logging.INFO, "sandbox: %s", self.containment)

    async def _survey(self) -> tuple[DockerEngine, DockerImage]:
        client = connect()
        try:
            engine = await survey(client)
            require_runtime(engine, self.config.runtime)
            require_memory_limit(engine, self.config.memory_unbounded)
            cleared = await clear_away(client, self._owner)
            if cleared.containers or cleared.images:
                logger.warning(
                    "sandbox: removed %d containers and %d images of snapshots that an earlier process of %s left",
                    *(cleared.containers, cleared.images, self._owner),
                )
            return engine, await find_image(client, self.config.image)
        finally:
            await client.close()

    def check_image(self, image: str | None) -> None:
        """Any that the engine has, which is asked when a box is started."""

    async def _open(self, slot: SessionSlot, release: Callable[[], None]) -> Session:
        """With a driver if the image's python3 can run it, else with a program execution per call."""
        image, needs = await self._image(slot.image or self.config.image), slot.needs
        if is_snapshot(image.name):
            release = self._sweeping_after(release)
        # A box with its own root has builds and services: no CPU limit in effect; share and run limits still hold.
        own = {"memory_mb": needs.memory_mb, "cpus": needs.cpus, "cpu_s": 1_000_000 if needs.own_root else None}
        config = self.config.model_copy(update={name: value for name, value in own.items() if value is not None})

        async def launch_driver() -> ContainerBox:
            command = self._driver_command(config)
            return await ContainerBox.open(await self._container(image, command, slot, config), self._driver)

        def launch_keeper() -> Awaitable[Container]:
            return self._container(image, KEEPER_COMMAND, slot, config, own_keeper=True)

        if image.image_id not in self._without_python:
            try:
                return DriverSession(slot.session_id, config, await launch_driver(), launch_driver, release)
            except NoSuchProgram:
                self._without_python.add(image.image_id)
        try:
            return ExecSession(slot.session_id, config, await launch_keeper(), launch_keeper, release)
        except NoSuchProgram as error:
            raise SandboxError(f"image {image.name} has neither python3 (3.9 or newer) nor sh: {error}") from error

    async def _image(self, name: str) -> DockerImage:
        """The same one for this maker's life, wherever its tag moves."""
        if name not in self._images and is_snapshot(name):
            raise NoSuchImage(f"image {name}: a snapshot that was forgotten, or that another process took")
        if name not in self._images:
            self._images[name] = await find_image(self._connected(), name)
        return self._images[name]

    async def _container(
        self, image: DockerImage, command: list[str], slot: SessionSlot, config: SandboxConfig, own_keeper: bool = False
    ) -> Container:
        """`own_keeper`: the first process gets its own uid: it cannot hide from programs that share its uid."""
        own_root, storage_bytes = slot.needs.own_root, None
        if own_root:
            if image.user.partition(":")[0] not in ("", "0", "root"):
                raise UnmetNeeds(
                    f"image {image.name} runs as user {image.user}: a box with its own root runs as root; give the"
                    " image USER root"
                )
            storage_bytes = (slot.needs.storage_mb or self.config.own_limits.storage_mb) << 20
            storage_bytes = max(0, storage_bytes - image.written_bytes)
        labels = labels_of(self._owner, slot.label, slot.session_id)
        spec = container_spec(config, self._engine, image, command, slot=slot.slot, labels=labels, own_root=own_root)
        user = spec["User"]
        if own_keeper:
            spec["User"] = keeper_of(self._engine.remaps_uids)
        return await self.in_turn(lambda: Container.start(self._connected(), spec, user, storage_bytes))

    def _connected(self) -> Docker:
        if self._client is None:
            self._client = connect(self._engine.api_version)
        return self._client

    # ---- copies

    async def _copy(self, session: Session, slot: SessionSlot) -> BoxCopy:
        image = await self._image(slot.image or self.config.image)
        if not slot.needs.own_root:
            return BoxCopy(await copy_folders(session, (TMP, *image.volumes)), slot.image, slot.needs)
        assert isinstance(session, DriverSession | ExecSession)
        folders = await copy_folders(session, image.volumes, themselves=True)
        copy = BoxCopy(folders, slot.image, slot.needs)
        try:
            snapshot_image, written_bytes = await session.hold(lambda box: self._commit(box, image, copy))
        except BaseException:
            copy.close()
            raise
        self._images[snapshot_image.name] = snapshot_image
        if image.image_id in self._without_python:
            self._without_python.add(snapshot_image.image_id)
        return replace(copy, image=snapshot_image.name, image_bytes=written_bytes)

    async def _commit(self, box: Box | Container, image: DockerImage, copy: BoxCopy) -> tuple[DockerImage, int]:
        """The image, and how many bytes are its own. Raises `SandboxError`, `SandboxBusy` among them."""
        container = box.container if isinstance(box, ContainerBox) else box
        assert isinstance(container, Container)
        written_bytes = await container.written_bytes()
        self._snapshots.require_room(copy.size_bytes + written_bytes)
        return await self._snapshot_images.commit(container, image, written_bytes), written_bytes

    async def _drop(self, copy: BoxCopy) -> None:
        await super()._drop(copy)
        if copy.image is not None and copy.needs.own_root:
            self._snapshot_images.drop(copy.image)
            await self._sweep()

    def _sweeping_after(self, release: Callable[[], None]) -> Callable[[], None]:
        """A box of a snapshot keeps its image; with the last of them it can go."""

        def released() -> None:
            release()
            sweep = asyncio.create_task(self._sweep(), name="sweep of snapshot images")
            self._sweeps.add(sweep)
            sweep.add_done_callback(self._sweeps.discard)

        return released

    async def _sweep(self) -> None:
        in_use = {slot.image for slot in self._requested_slots.values() if slot.image is not None}
        for name in list(filter(is_snapshot, self._images)):
            if name not in in_use and not self._snapshot_images.is_wanted(name):
                del self._images[name]
        await self._snapshot_images.sweep(in_use)

    async def close(self) -> None:
        await super().close()
        if self._sweeps:
            await asyncio.wait(self._sweeps)
        await self._snapshot_images.close()
        if self._client is not None:
            await self._client.close()
            self._client = None

    def _driver_command(self, config: SandboxConfig) -> list[str]:
        settings: dict[str, object] = {
            "boxed": True,
            "pipes": True,
            "counts_oom_kills": True,
            "cpu_s": config.cpu_s,
            "output_bytes": config.output_bytes,
        }
        if self._filter is not None:
            settings["filter"] = base64.b64encode(self._filter).decode("ascii")
        if not self._engine.limits_memory:
            settings["address_space"] = config.memory_mb << 20
        if not self._engine.limits_pids:
            settings["processes"] = config.pids
        return command_from_stdin(PYTHON, settings)


def describe(engine: DockerEngine, config: SandboxConfig, filtered: bool) -> tuple[str, bool]:
    """(Which walls stand, in words; whether one is missing)"""
    runtime = config.runtime or engine.default_runtime
    walls = [f"docker {engine.version} ({runtime}): no network, read-only root, private /tmp, no capabilities"]
    walls.append("the engine's seccomp profile" + (" and ours" if filtered else ""))
    walls.append("a uid per box" + (", of remapped users" if engine.remaps_uids else ""))
    missing = []
    if "runsc" in runtime:
        missing.append("gVisor lets a box's code open its driver's pipes: it can forge results of its session")
    if not engine.limits_memory:
        missing.append("memory is limited per process, not per box")
    if not engine.limits_pids:
        missing.append("processes are limited per uid")
    if not engine.limits_cpu:
        missing.append("CPU share is not limited")
    if not limits_socket_memory(engine.cgroup_version):
        missing.append("buffers of sockets are not limited (cgroup v1, and this process may not write there)")
    if config.own_root:
        missing.append("sessions with an own root run as root, with what they write watched, not limited")
    if missing:
        walls.append(f"missing here: {', '.join(missing)}")
    else:
        walls.append(f"cgroup v{engine.cgroup_version} for memory, processes and CPU")
    return "; ".join(walls), bool(missing)
