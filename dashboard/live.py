"""The state of a living run: one question to the queue answers every page that asks within `FRESH_S`.

pages ──► Pulse.of(run) ──at most once per FRESH_S and run──► status · servers        every UPDATES_S: updates
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from penstock.dashboard.plain import plain
from penstock.transfer_queue import QueueError, TransferQueue, WeightUpdate

FRESH_S = 0.5
UPDATES_S = 10.0
DEADLINE_S = 5.0
NEWEST_UPDATES = 20


class LiveQueues(Protocol):
    """Where the queues of living runs are found; owns the connections."""

    def names(self) -> Sequence[str]:
        """Runs that may be alive."""

    async def queue(self, run: str) -> TransferQueue | None:
        """A connected one; None where the run does not live. Raises `QueueError`."""

    async def close(self) -> None: ...


class NotAlive(Exception):
    """The run has no queue now; the message says why."""


@dataclass(slots=True)
class _Beat:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    at: float = 0.0
    told: dict[str, Any] = field(default_factory=dict)
    updates_at: float = 0.0
    updates: dict[str, Any] = field(default_factory=dict)


class Pulse:
    """Asks the queues."""

    def __init__(self, queues: LiveQueues) -> None:
        self._queues = queues
        self._beats: dict[str, _Beat] = {}

    async def queue(self, run: str) -> TransferQueue:
        """Raises `NotAlive`, `QueueError`."""
        queue = await self._queues.queue(run)
        if queue is None:
            raise NotAlive(f"run {run!r} is not going on, or its queue cannot be reached from here")
        return queue

    async def of(self, run: str) -> dict[str, Any]:
        """``alive`` and, where it is, the status, servers and weight updates; where it is not, the ``cause``."""
        beat = self._beats.setdefault(run, _Beat())
        async with beat.lock:
            if time.monotonic() - beat.at > FRESH_S or not beat.told:
                beat.told = await self._ask(run, beat)
                beat.at = time.monotonic()
            return beat.told

    async def _ask(self, run: str, beat: _Beat) -> dict[str, Any]:
        try:
            async with asyncio.timeout(DEADLINE_S):
                queue = await self.queue(run)
                status, servers = await queue.status(), await queue.servers()
                if time.monotonic() - beat.updates_at > UPDATES_S or not beat.updates:
                    beat.updates, beat.updates_at = told_updates(await queue.updates()), time.monotonic()
        except TimeoutError:
            return {"alive": False, "cause": f"the queue did not answer within {DEADLINE_S:g} s"}
        except (NotAlive, QueueError) as error:
            return {"alive": False, "cause": str(error)}
        servers = sorted(servers, key=lambda server: server.server_id)
        return {
            "alive": True,
            "at_unix_s": time.time(),
            "status": plain(status),
            "servers": [{**plain(server), "lag": max(0, status.version - server.version)} for server in servers],
            "updates": beat.updates,
        }


def told_updates(updates: Sequence[WeightUpdate]) -> dict[str, Any]:
    """How long swaps paused their servers, and the newest of them, newest first."""
    pauses_ms = [1000 * update.pause_s for update in updates]
    return {
        "count": len(updates),
        "pause_ms_p50": float(np.percentile(pauses_ms, 50)) if pauses_ms else None,
        "pause_ms_p99": float(np.percentile(pauses_ms, 99)) if pauses_ms else None,
        "newest": [plain(update) for update in updates[: -NEWEST_UPDATES - 1 : -1]],
    }
