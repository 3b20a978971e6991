"""Usage of an agent worker by episode, for the queue's ledger: the time of sandbox boxes, and calls of judges."""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager
from functools import wraps
from typing import Any, cast

from penstock.agent_loops.tracing import current_episode, exported_span
from penstock.sandbox import Sandbox
from penstock.transfer_queue import TransferQueue, UsageMeter

OPENS, ENDS = frozenset({"start", "attach", "fork"}), frozenset({"close", "leave"})
"""Verbs of a sandbox that return a session, and of a session that give its box up."""
RUNS = ("run", "run_python", "run_shell", "run_served", "open_port", "write_file", "read_file")
AWAITED = OPENS | ENDS | set(RUNS)
"""Verbs that are spans; a stream is its reader's own time."""


class WorkerUsage:
    """Open boxes of one worker, and what else its episodes use. A box is its episode's until it is closed, or left to
    another worker."""

    def __init__(self, worker: str) -> None:
        self._meter = UsageMeter(worker, self._count_open)
        self._open: dict[int, tuple[str, float]] = {}
        """Session → its episode, and until when it is counted."""

    def add(self, episode: str, resource: str, amount: float) -> None:
        self._meter.add(episode, resource, amount)

    def opened(self, session: object) -> None:
        self._open[id(session)] = (current_episode(), time.monotonic())

    def ended(self, session: object) -> None:
        self._count(id(session))
        self._open.pop(id(session), None)

    def reported(self, queue: TransferQueue) -> AbstractAsyncContextManager[None]:
        """Report to the queue's ledger in the block, and at its end."""
        return self._meter.reported(queue.report_usage)

    async def report(self, queue: TransferQueue) -> None:
        """Report up to now; what the queue does not take is kept."""
        await self._meter.report(queue.report_usage)

    def _count_open(self) -> None:
        for session in self._open:
            self._count(session)

    def _count(self, session: int) -> None:
        if session in self._open:
            (episode, since), now = self._open[session], time.monotonic()
            self._meter.add(episode, "box_s", now - since)
            self._open[session] = (episode, now)


def observed(sandbox: Sandbox, usage: WorkerUsage) -> Sandbox:
    """Returns the same sandbox: `usage` counts its boxes, and its calls are spans if OpenTelemetry is on."""
    return cast(Sandbox, _Observed(sandbox, usage))


class _Observed:
    """A sandbox, or a session of it; what is not awaited is as it is."""

    def __init__(self, inner: Any, usage: WorkerUsage) -> None:
        self._inner, self._usage = inner, usage

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._inner, name)
        if name == "snapshot":
            return lambda session: verb(session._inner)
        if name not in AWAITED:
            return verb

        @wraps(verb)
        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                with exported_span("sandbox", name):
                    result = await verb(*args, **kwargs)
            finally:
                if name in ENDS:
                    self._usage.ended(self)
            if name not in OPENS:
                return result
            session = _Observed(result, self._usage)
            self._usage.opened(session)
            return session

        return call
