"""What every maker of driver boxes does alike: slots, session ids, closing."""

from __future__ import annotations

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod

from penstock.sandbox.box import Box
from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.protocol import SandboxBusy, SandboxError, SandboxLost
from penstock.sandbox.session import DriverSession

logger = logging.getLogger(__name__)

QUEUE_TIMEOUT_S = 120.0
HOST = "host"
"""The one image of boxes that show this machine's /usr."""


class DriverSandbox(ABC):
    """At most `config.max_boxes` sessions at once; further ones wait up to `queue_timeout_s`."""

    containment: str
    """Which walls stand, in words."""

    def __init__(self, config: SandboxConfig, queue_timeout_s: float = QUEUE_TIMEOUT_S) -> None:
        self.config = config
        self.queue_timeout_s = queue_timeout_s
        self._sessions: dict[str, DriverSession] = {}
        self._slots: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(config.max_boxes):
            self._slots.put_nowait(slot)

    @abstractmethod
    async def _launch(self, slot: int) -> Box:
        """A fresh box; no other living one has this slot. Raises `SandboxError`."""

    def check_image(self, image: str | None) -> None:
        """Raises `SandboxError` where boxes of `image` cannot be made."""
        if image not in (None, HOST):
            raise SandboxError(
                f"image {image!r}: a {self.config.backend} box shows this machine's own system ({HOST!r}); boxes of"
                " images need sandbox.backend: docker"
            )

    async def start(self, label: str, *, image: str | None = None) -> DriverSession:
        self.check_image(image)
        slot = await self._free_slot()
        session_id = secrets.token_hex(12)

        def release() -> None:
            self._sessions.pop(session_id, None)
            self._slots.put_nowait(slot)

        session = DriverSession(session_id, self.config, lambda: self._launch(slot), release)
        self._sessions[session_id] = session
        await session.open()
        logger.debug("box %s in slot %d for %s", session_id, slot, label)
        return session

    async def _free_slot(self) -> int:
        try:
            async with asyncio.timeout(self.queue_timeout_s):
                return await self._slots.get()
        except TimeoutError as error:
            waited = f"all {self.config.max_boxes} boxes were in use for {self.queue_timeout_s:g} s"
            raise SandboxBusy(f"{waited}: raise sandbox.max_boxes or lower agent.concurrency") from error

    async def attach(self, session_id: str) -> DriverSession:
        """Only this process's own: a box ends with the process that opened it."""
        if session_id not in self._sessions:
            raise SandboxLost(f"no session {session_id} here: a box ends with the process that opened it")
        return self._sessions[session_id]

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in list(self._sessions.values())))
