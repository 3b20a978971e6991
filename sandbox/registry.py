"""Sessions of a sandbox server: who has which, for how long nobody used it, and its end after that."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.sandbox.protocol import Sandbox, SandboxError, SandboxLost, Session

logger = logging.getLogger(__name__)

REAP_EVERY_S = 1.0


@dataclass(slots=True)
class Entry:
    session: Session
    label: str
    ttl_s: float
    """Ended when nobody used it for so long."""
    last_use: float = field(default_factory=time.monotonic)
    users: int = 0
    """Requests in progress; a session in use is never ended."""

    @property
    def idle_s(self) -> float:
        return 0.0 if self.users else time.monotonic() - self.last_use


class SessionRegistry:
    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._entries: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    async def start(self, label: str, ttl_s: float) -> Entry:
        entry = Entry(await self._sandbox.start(label), label, ttl_s)
        self._entries[entry.session.session_id] = entry
        return entry

    def get(self, session_id: str) -> Entry:
        """Raises `SandboxLost`."""
        if session_id not in self._entries:
            raise SandboxLost(f"no session {session_id}: ended, or its time without use was over")
        return self._entries[session_id]

    @contextlib.contextmanager
    def using(self, session_id: str) -> Iterator[Entry]:
        """Holds the session against reaping; one whose box is lost is forgotten."""
        entry = self.get(session_id)
        entry.users += 1
        try:
            yield entry
        except SandboxLost:
            self._entries.pop(session_id, None)
            raise
        finally:
            entry.users -= 1
            entry.last_use = time.monotonic()

    async def end(self, session_id: str) -> None:
        entry = self._entries.pop(session_id, None)
        if entry is not None:
            await entry.session.close()

    async def reap_for_ever(self) -> None:
        while True:
            await asyncio.sleep(REAP_EVERY_S)
            for session_id, entry in list(self._entries.items()):
                if entry.idle_s > entry.ttl_s:
                    await self._reap(session_id, entry)

    async def _reap(self, session_id: str, entry: Entry) -> None:
        logger.info("sandbox session %s (%s) ended after %.0f s without use", session_id, entry.label, entry.idle_s)
        try:
            await self.end(session_id)
        except SandboxError as error:
            logger.warning("sandbox session %s could not be ended: %s", session_id, error)
