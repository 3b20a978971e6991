"""A box whose driver is a container's first process."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.sandbox.box import START_DEADLINE_S
from penstock.sandbox.docker.container import Container
from penstock.sandbox.docker.engine import NoSuchProgram
from penstock.sandbox.frames import Box, BoxEnded
from penstock.sandbox.protocol import SandboxError

UNFIT_PYTHON = ("Python 3.9 or newer is needed", "ModuleNotFoundError")
"""What an image's python3 says where it cannot run the driver: too old, or without half of its library."""


class ContainerBox(Box):
    """Frames over the container's stdin and stdout. The driver counts what ran out of memory and tells it along."""

    def __init__(self, container: Container) -> None:
        super().__init__()
        self._container = container
        self._reader = container.stdout
        self._writer = container
        self._oom_kills = 0
        self._oom_kills_seen = 0

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
            reason = box.last_words or f"no answer in {START_DEADLINE_S:.0f} s"
            await box.end()
            kind = NoSuchProgram if any(sign in reason for sign in UNFIT_PYTHON) else SandboxError
            raise kind(f"the box did not start: {reason}") from error
        except BaseException:
            await box.end()
            raise
        return box

    @property
    def alive(self) -> bool:
        return self._container.alive

    @property
    def last_words(self) -> str:
        return self._container.last_words

    async def _receive(self) -> dict[str, Any]:
        try:
            answer = await super()._receive()
        except BoxEnded:
            if await self._container.ran_out_of_memory():
                self._oom_kills += 1
            raise
        self._oom_kills = answer.get("oom_kills", self._oom_kills)
        return answer

    def new_oom_kills(self) -> int:
        new, self._oom_kills_seen = self._oom_kills - self._oom_kills_seen, self._oom_kills
        return new

    async def end(self) -> None:
        await self._container.end()
