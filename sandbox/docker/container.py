"""One container, from its creation to its removal.

    worker ──hijacked HTTP connection──► engine ──pipes──► first process of the container

The connection carries the first process's stdin, stdout and stderr. When it closes, for whatever reason, the engine
closes that stdin, the first process ends, the kernel ends everything else in the container and the engine removes it.

A box whose driver is a container's first process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from typing import TYPE_CHECKING, Any

from penstock.sandbox.box import Box, BoxEnded
from penstock.sandbox.docker.engine import (
    CALL_DEADLINE_S,
    NoSuchProgram,
    calling,
    connect,
    limit_socket_memory,
    oom_counters,
)
from penstock.sandbox.inside.driver import oom_kills
from penstock.sandbox.protocol import SandboxError

if TYPE_CHECKING:
    from aiodocker import Docker
    from aiodocker.execs import Exec
    from aiodocker.stream import Stream


logger = logging.getLogger(__name__)
START_DEADLINE_S = 20.0
"""Until the driver answers in a container that runs."""
END_DEADLINE_S = 30.0
"""The engine itself may wait 10 s for the end of a process that it killed."""
_GONE, _BEING_REMOVED = 404, 409
_OUT = 1
"""Which stream a piece of output belongs to, in the engine's framing."""


class Container:
    """A running container; the owner awaits `end` whatever happened."""

    def __init__(self, control: Docker, user: str) -> None:
        self.broken_limit: str | None = None
        """``storage`` if it was ended because of its written bytes."""
        self._watch: asyncio.Task[None] | None = None
        self.name = f"penstock-{secrets.token_hex(8)}"
        self.stdout = asyncio.StreamReader()
        """Stdout of the first process."""
        self.control = control
        self.user = user
        """Whom further programs run as."""
        self._id = ""
        self._last_words = bytearray()
        self._to_write = bytearray()
        self._attached: Docker | None = None
        """A separate client: one pool's connections would run out with many boxes."""
        self._stream: Stream | None = None
        self._pump: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, control: Docker, spec: dict[str, Any], user: str, storage_bytes: int | None = None
    ) -> Container:
        """Created, attached to and started; ended once it has written more than `storage_bytes`.

        Raises `SandboxError`; nothing is left then.
        """
        container = cls(control, user)
        starting = asyncio.create_task(container._start(spec))
        try:
            await asyncio.shield(starting)
        except BaseException:
            # in its own task: a caller that is cancelled again must not leave a container behind
            await asyncio.shield(asyncio.create_task(container._end_after(starting)))
            raise
        if storage_bytes is not None:
            container._watch = asyncio.create_task(container._watch_storage(storage_bytes))
        return container

    async def _end_after(self, starting: asyncio.Task[None]) -> None:
        """Waits for the start: cut off in the middle, a create could make the container after its removal."""
        await asyncio.wait([starting])
        starting.exception()  # retrieved, also where the caller was cancelled
        await self.end()

    async def _start(self, spec: dict[str, Any]) -> None:
        async with calling(f"starting a box of image {spec['Image'][:24]}", 2 * CALL_DEADLINE_S):
            created = await self.control.containers.create(spec, name=self.name)
            self._id = created.id
            self._attached = connect(self.control.api_version)
            self._stream = self._attached.containers.container(created.id).attach(stdin=True, stdout=True, stderr=True)
            await self._stream.__aenter__()
            await created.start()
            limit_socket_memory(created.id, spec["HostConfig"]["Memory"])
        self._pump = asyncio.create_task(self._read_all(self._stream))

    async def _read_all(self, stream: Stream) -> None:
        """Until the engine closes the connection. Only our own first process writes here: no limit but the frames'."""
        try:
            while (message := await stream.read_out()) is not None:
                if message.stream == _OUT:
                    self.stdout.feed_data(message.data)
                else:
                    self._last_words += message.data[: 2000 - len(self._last_words)]
        except Exception as error:  # noqa: BLE001 - a broken connection in any of its forms: the reader sees the end
            logger.debug("docker: %s: %s", self.name, error)
        finally:
            self.stdout.feed_eof()

    async def _watch_storage(self, most_bytes: int) -> None:
        """Engines on most file systems have no quota: without this a box could fill the host's disk.

        A box whose size the engine does not tell is ended: it is then lost, not over its limit.
        """
        failed = 0
        while self.alive:
            started = time.monotonic()
            try:
                written = await self.written_bytes()
                failed = 0
            except SandboxError as error:
                logger.debug("docker: %s: its size is not known: %s", self.name, error)
                written, failed = 0, failed + 1
            if written > most_bytes or failed >= 3:
                self.broken_limit = "storage" if written > most_bytes else None
                with contextlib.suppress(SandboxError):
                    await remove(self.control, self.name)
                return
            # The pause between two looks at what a box has written; longer where a look takes long.
            await asyncio.sleep(max(2.0, 20 * (time.monotonic() - started)))

    async def written_bytes(self) -> int:
        """To its image's file system, as the engine counts it. Raises `SandboxError`."""
        async with calling("asking what a box has written"):
            details = await self.control.containers.container(self.name).show(size=1)
        return int(details.get("SizeRw") or 0)

    @property
    def alive(self) -> bool:
        return self._pump is not None and not self._pump.done()

    @property
    def stderr_tail(self) -> str:
        return self._last_words.decode("utf-8", "replace").strip()

    # ---- a writer, as asyncio's streams have one

    def write(self, data: bytes) -> None:
        self._to_write += data

    async def drain(self) -> None:
        """Raises `ConnectionError` where the container is gone."""
        data = bytes(self._to_write)
        self._to_write.clear()
        assert self._stream is not None
        try:
            await self._stream.write_in(data)
        except (RuntimeError, AttributeError, AssertionError) as error:  # what aiodocker says of a closed connection
            raise ConnectionResetError("the container's stdin is closed") from error

    # ---- further programs in it

    async def prepare(self, argv: list[str], cwd: str | None, with_stdin: bool) -> Exec:
        """A program that has not started yet, as the box's own user; inside `calling`."""
        container = self.control.containers.container(self.name)
        return await container.exec(
            argv,
            stdin=with_stdin,
            stdout=True,
            stderr=True,
            user=self.user,
            workdir=cwd or "/tmp",  # noqa: S108 - the box's own
        )

    def oom_kills(self) -> int | None:
        """So far; None where only the box itself can see it."""
        return oom_kills(oom_counters(self._id))

    # ---- its end

    async def ran_out_of_memory(self) -> bool:
        """Return True if a container that ended by itself ran out of memory: from inside, only lack of memory can end
        the first process.

        The engine sends its last 256 events, then new ones without end: its clock is not compared with ours.
        """
        params = {"since": "1", "filters": json.dumps({"container": [self.name], "event": ["oom"]})}
        with contextlib.suppress(SandboxError):
            # The engine has a second to report why a container ended.
            async with (
                calling("asking why a box ended", 1.0),
                self.control._query("events", params=params) as answer,
            ):
                return bool(await answer.content.readline())
        return False

    async def end(self) -> None:
        """Everything in it is gone afterwards; an engine that cannot say so is logged, and `orphans` comes by."""
        for task in (self._watch, self._pump):
            if task is not None:
                task.cancel()
        if self._stream is not None:
            with contextlib.suppress(AssertionError):  # aiodocker's word for a connection that is closed already
                await self._stream.close()
        if self._attached is not None:
            await self._attached.close()
        try:
            if self._pump is None or not await self._removed_by_itself():
                await remove(self.control, self.name)
        except SandboxError as error:
            logger.error("%s", error)

    async def _removed_by_itself(self) -> bool:
        """The usual end: its stdin closed, so it ended, so the engine removed it. A second removal would disturb."""
        import aiodocker

        try:
            # A first process whose stdin closed has 2 s to end; then the engine kills it.
            async with asyncio.timeout(2.0), calling("waiting for a box to end"):
                await self.control.containers.container(self.name).wait(condition="removed")
        except TimeoutError:
            return False
        except SandboxError as error:
            return isinstance(error.__cause__, aiodocker.DockerError) and error.__cause__.status == _GONE
        return True


async def remove(client: Docker, name: str) -> None:
    """Kills and removes; returns once the engine does not know it any more. Raises `SandboxError`."""
    import aiodocker

    async with calling(f"removing container {name}", END_DEADLINE_S):
        while True:
            try:
                return await client.containers.container(name).delete(force=True, v=True)
            except aiodocker.DockerError as error:
                if error.status == _GONE:
                    return
                if error.status != _BEING_REMOVED:
                    raise
            await asyncio.sleep(0.02)


class ContainerBox(Box):
    """Frames over the container's stdin and stdout. The driver reports out-of-memory kills with each result."""

    def __init__(self, container: Container) -> None:
        super().__init__()
        self.container = container
        self._reader = container.stdout
        self._writer = container

    @classmethod
    async def open(cls, container: Container, driver: bytes) -> ContainerBox:
        """`driver`: what its boot code reads first.

        Raises:
            NoSuchProgram: the container's python3 cannot run it.
            SandboxError: another reason; the container is removed in both cases.
        """
        box = cls(container)
        try:
            container.write(driver)
            async with asyncio.timeout(START_DEADLINE_S):
                await container.drain()
                await box._receive()
        except (BoxEnded, ConnectionError, TimeoutError) as error:
            reason = box.stderr_tail or f"no answer in {START_DEADLINE_S:.0f} s"
            await box.end()
            # a python3 that is too old, or has half of its library
            is_unfit = "Python 3.9 or newer is needed" in reason or "ModuleNotFoundError" in reason
            kind = NoSuchProgram if is_unfit else SandboxError
            raise kind(f"the box did not start: {reason}") from error
        except BaseException:
            await box.end()
            raise
        return box

    @property
    def alive(self) -> bool:
        return self.container.alive

    @property
    def broken_limit(self) -> str | None:
        return self.container.broken_limit

    @property
    def stderr_tail(self) -> str:
        return self.container.stderr_tail

    async def _receive(self) -> dict[str, Any]:
        try:
            answer = await super()._receive()
        except BoxEnded:
            if await self.container.ran_out_of_memory():
                self._oom_kills += 1
            raise
        self._oom_kills = answer.get("oom_kills", self._oom_kills)
        return answer

    async def end(self) -> None:
        await self.container.end()
