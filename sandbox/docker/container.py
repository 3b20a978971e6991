"""One container, from its creation to its removal.

    worker ──hijacked HTTP connection──► engine ──pipes──► first process of the container

The connection carries the first process's stdin, stdout and stderr. When it closes, for whatever reason, the engine
closes that stdin, the first process ends, the kernel ends everything else in the container and the engine removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from typing import TYPE_CHECKING, Any

from penstock.sandbox.docker.engine import CALL_DEADLINE_S, calling, connect
from penstock.sandbox.docker.socket_memory import limit_socket_memory
from penstock.sandbox.protocol import SandboxError

if TYPE_CHECKING:
    from aiodocker import Docker
    from aiodocker.containers import DockerContainer
    from aiodocker.execs import Exec

logger = logging.getLogger(__name__)

END_DEADLINE_S = 10.0
OOM_DEADLINE_S = 1.0
"""How long the engine may take to tell why a container ended."""
_LAST_WORDS_BYTES = 2000
_OUT, _ERR = 1, 2
"""Which stream a piece of output belongs to, in the engine's framing."""


class Container:
    """A running container; the owner awaits `remove` whatever happened."""

    def __init__(self, control: Docker) -> None:
        self.name = f"penstock-{secrets.token_hex(8)}"
        self.stdout = asyncio.StreamReader()
        """What its first process writes."""
        self.control = control
        self._created_at = time.time()
        self._last_words = bytearray()
        self._to_write = bytearray()
        self._attached: Docker | None = None
        """A client of its own: one pool's connections would run out with many boxes."""
        self._pump: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, control: Docker, spec: dict[str, Any]) -> Container:
        """Created, attached to and started. Raises `SandboxError`; nothing is left then."""
        container = cls(control)
        starting = asyncio.create_task(container._start(spec))
        try:
            await asyncio.shield(starting)
        except BaseException:
            # cut off in the middle, a create could make the container after its removal was tried
            await asyncio.wait([starting])
            await container.remove()
            raise
        return container

    async def _start(self, spec: dict[str, Any]) -> None:
        async with calling(f"starting a box of image {spec['Image'][:24]}", 2 * CALL_DEADLINE_S):
            made = await self.control.containers.create(spec, name=self.name)
            self._attached = connect(self.control.api_version)
            self._stream = self._attached.containers.container(made.id).attach(stdin=True, stdout=True, stderr=True)
            await self._stream.__aenter__()
            await made.start()
            limit_socket_memory(made.id, spec["HostConfig"]["Memory"])
        self._pump = asyncio.create_task(self._read_all())

    async def _read_all(self) -> None:
        """Until the engine closes the connection. Only our own first process writes here: no limit but the frames'."""
        try:
            while (message := await self._stream.read_out()) is not None:
                if message.stream == _OUT:
                    self.stdout.feed_data(message.data)
                else:
                    self._last_words += message.data[: _LAST_WORDS_BYTES - len(self._last_words)]
        except Exception as error:  # noqa: BLE001 - a broken connection in any of its forms: the reader sees the end
            logger.debug("docker: %s: %s", self.name, error)
        finally:
            self.stdout.feed_eof()

    @property
    def alive(self) -> bool:
        return self._pump is not None and not self._pump.done()

    @property
    def last_words(self) -> str:
        return self._last_words.decode("utf-8", "replace").strip()

    # ---- a writer, as asyncio's streams have one

    def write(self, data: bytes) -> None:
        self._to_write += data

    async def drain(self) -> None:
        """Raises `ConnectionError` where the container is gone."""
        data = bytes(self._to_write)
        self._to_write.clear()
        try:
            await self._stream.write_in(data)
        except (RuntimeError, AttributeError) as error:  # what aiodocker says of a closed connection
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
            workdir=cwd or "/tmp",  # noqa: S108 - the box's own
        )

    # ---- its end

    async def ran_out_of_memory(self) -> bool:
        """Of a container that ended by itself: from inside, only lack of memory can end the first process."""
        until = time.time() + OOM_DEADLINE_S
        wanted = {"container": [self.name], "event": ["oom"]}
        params = {"since": f"{self._created_at:.3f}", "until": f"{until:.3f}", "filters": json.dumps(wanted)}
        with contextlib.suppress(SandboxError):
            async with (
                calling("asking why a box ended", OOM_DEADLINE_S + 1.0),
                self.control._query("events", params=params) as answer,
            ):
                return bool(await answer.content.readline())
        return False

    async def remove(self) -> None:
        """Everything in it is gone afterwards; an engine that cannot say so is logged, and `leftovers` comes by."""
        if self._attached is not None:
            with contextlib.suppress(Exception):
                await self._stream.close()
            await self._attached.close()
        if self._pump is not None:
            self._pump.cancel()
        try:
            await remove(self.control, self.name)
        except SandboxError as error:
            logger.error("%s", error)


async def remove(client: Docker, name: str) -> None:
    """Kills and removes; returns once the engine does not know it any more. Raises `SandboxError`."""
    async with calling(f"removing container {name}", END_DEADLINE_S):
        container = client.containers.container(name)
        while await _still_there(container):  # noqa: ASYNC110 - nothing in this process knows when
            await asyncio.sleep(0.02)


async def _still_there(container: DockerContainer) -> bool:
    import aiodocker

    try:
        await container.delete(force=True, v=True)
    except aiodocker.DockerError as error:
        if error.status == 404:
            return False
        if error.status == 409:  # being removed already, by its own end
            return True
        raise
    return False
