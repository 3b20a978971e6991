"""Sessions of a server: their callers, their time without use, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.sandbox.idempotency import IdempotencyCache
from penstock.sandbox.protocol import BoxNeeds, SandboxLost, Session
from penstock.sandbox.server.callers import Caller, Quotas
from penstock.sandbox.server.metrics import SandboxMetrics
from penstock.sandbox.server.pool import BoxPool

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class SessionEntry:
    session: Session
    caller: Caller
    label: str
    image: str | None
    ttl_s: float
    """Ended after this time without use."""
    started_at: float = field(default_factory=time.monotonic)
    last_use: float = field(default_factory=time.monotonic)
    users: int = 0
    """Calls in progress; a session in use is ended only for its age."""
    start_key: str | None = None
    answers: IdempotencyCache[Any] = field(default_factory=IdempotencyCache)
    """Results by idempotency key."""

    def touch(self) -> None:
        self.last_use = time.monotonic()

    @property
    def idle_s(self) -> float:
        return 0.0 if self.users else time.monotonic() - self.last_use

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_at

    @property
    def over(self) -> bool:
        # Older sessions are ended, however busy: no episode takes a day.
        return self.idle_s > self.ttl_s or self.age_s > 86400.0


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """The parameters of a new session."""

    caller: Caller
    label: str
    image: str | None
    ttl_s: float
    needs: BoxNeeds | None = None


class Sessions:
    def __init__(self, pool: BoxPool, quotas: Quotas, metrics: SandboxMetrics) -> None:
        self.entries: dict[str, SessionEntry] = {}
        self._pool = pool
        self._quotas = quotas
        self._metrics = metrics
        self._starts: IdempotencyCache[SessionEntry] = IdempotencyCache()

    async def start(self, request: SessionRequest, wait_s: float, key: str | None = None) -> SessionEntry:
        """A fresh session; with a `key` that a living session of this caller was started by, that one.

        Raises `OverQuota`, `SandboxBusy` (queue deadline), `SandboxError`.
        """
        key = f"{request.caller.name}/{key}" if key else None
        entry = await self._starts.once(key, lambda: self._start(request, wait_s, key))
        entry.touch()
        return entry

    async def _start(self, request: SessionRequest, wait_s: float, key: str | None) -> SessionEntry:
        caller = request.caller
        self._quotas.take_box(caller)
        try:
            with self._metrics.start_s.time():
                session = await self._pool.take(request.label, request.image, wait_s, request.needs)
        except BaseException:
            self._quotas.free_box(caller)
            raise
        entry = SessionEntry(session, caller, request.label, request.image, request.ttl_s, start_key=key)
        self.entries[session.session_id] = entry
        return entry

    def get(self, session_id: str, caller: Caller) -> SessionEntry:
        """Raises `SandboxLost`, also for sessions of other callers: their existence is not revealed."""
        entry = self.entries.get(session_id)
        if entry is None or entry.caller is not caller:
            raise SandboxLost(f"no session {session_id}: it was ended, or its time without use was exceeded")
        return entry

    def of(self, caller: Caller, label: str) -> list[SessionEntry]:
        """This caller's sessions whose label begins with `label`."""
        return [e for e in self.entries.values() if e.caller is caller and e.label.startswith(label)]

    @contextlib.asynccontextmanager
    async def using(self, entry: SessionEntry) -> AsyncIterator[SessionEntry]:
        """Protects the session from reaping and counts one running call; a session whose box is lost is removed."""
        with self._quotas.call(entry.caller):
            entry.users += 1
            try:
                yield entry
            except SandboxLost:
                await self.end(entry)
                raise
            finally:
                entry.users -= 1
                entry.touch()

    async def use(self, entry: SessionEntry, key: str | None, work: Callable[[Session], Awaitable[T]]) -> T:
        """Runs `work` on the session; a `key` that was used before returns the first result.

        Under a key it continues after the client disconnects: the session's next owner asks for the result.
        """

        async def do() -> T:
            async with self.using(entry):
                return await work(entry.session)

        entry.touch()
        answer: T = await entry.answers.once(key, do)
        return answer

    async def end(self, entry: SessionEntry) -> None:
        """Safe to call twice."""
        if self.entries.pop(entry.session.session_id, None) is None:
            return
        if entry.start_key is not None:
            self._starts.forget(entry.start_key)
        try:
            await self._pool.give_back(entry.session)
        finally:
            self._quotas.free_box(entry.caller)

    async def end_all(self) -> None:
        await asyncio.gather(*(self.end(entry) for entry in list(self.entries.values())), return_exceptions=True)

    async def reap_for_ever(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            over = [entry for entry in self.entries.values() if entry.over]
            for entry in over:
                logger.info(
                    "sandbox session of %s (%s): unused for %.0f s", entry.caller.name, entry.label, entry.idle_s
                )
                self._metrics.reaped.inc()
            await asyncio.gather(*map(self.end, over))
