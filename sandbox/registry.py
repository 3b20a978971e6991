"""Sessions of a sandbox server: who has which, for how long nobody used it, and its end after that."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.sandbox.protocol import Sandbox, SandboxError, SandboxLost, Session
from penstock.sandbox.recorded import Recorded

logger = logging.getLogger(__name__)

REAP_EVERY_S = 1.0
T = TypeVar("T")


@dataclass(slots=True)
class Entry:
    session: Session
    label: str
    ttl_s: float
    """Ended when nobody used it for so long."""
    last_use: float = field(default_factory=time.monotonic)
    users: int = 0
    """Requests in progress; a session in use is never ended."""
    start_key: str | None = None
    answers: Recorded[Any] = field(default_factory=Recorded)
    """What was asked under a key, and what came of it."""

    @property
    def idle_s(self) -> float:
        return 0.0 if self.users else time.monotonic() - self.last_use


class SessionRegistry:
    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._entries: dict[str, Entry] = {}
        self._starts: Recorded[Entry] = Recorded()

    def __len__(self) -> int:
        return len(self._entries)

    async def start(self, label: str, ttl_s: float, key: str | None = None) -> Entry:
        """A fresh session; with a `key` that a living session was started by, that one. Raises `SandboxError`."""
        return await self._starts.once(key, lambda: self._start(label, ttl_s, key))

    async def _start(self, label: str, ttl_s: float, key: str | None) -> Entry:
        entry = Entry(await self._sandbox.start(label), label, ttl_s, start_key=key)
        self._entries[entry.session.session_id] = entry
        return entry

    async def use(self, session_id: str, key: str | None, work: Callable[[Session], Awaitable[T]]) -> T:
        """`work` on the session; under a `key` that was used before, what came of it then. Raises `SandboxLost`.

        Under a key it goes on also where whoever asked is gone: the session's next owner asks for what came of it.
        """

        async def do() -> T:
            with self.using(session_id) as entry:
                return await work(entry.session)

        entry = self.get(session_id)
        entry.last_use = time.monotonic()
        answer: T = await entry.answers.once(key, do)
        return answer

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
            self._forget(session_id)
            raise
        finally:
            entry.users -= 1
            entry.last_use = time.monotonic()

    async def end(self, session_id: str) -> None:
        entry = self._forget(session_id)
        if entry is not None:
            await entry.session.close()

    def _forget(self, session_id: str) -> Entry | None:
        entry = self._entries.pop(session_id, None)
        if entry is not None and entry.start_key is not None:
            self._starts.forget(entry.start_key)
        return entry

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
