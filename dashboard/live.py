"""The state of living runs, asked of their queues. One question serves all pages that ask within `FRESH_S`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from penstock.dashboard.jsonable import plain
from penstock.dashboard.runs import RunFiles, flat
from penstock.transfer_queue import DeadLetter, JournalEntry, QueueError, TransferQueue

Decode = Callable[[Sequence[int]], str]


@lru_cache(maxsize=8)
def decoder_of(model: str) -> Decode | None:
    """Return a decoder from the tokenizer in a model's folder; None if it is not on this machine."""
    from tokenizers import Tokenizer

    file = Path(model) / "tokenizer.json"
    if not file.is_file():
        return None
    tokenizer = Tokenizer.from_file(str(file))

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    return decode


def letter_line(letter: DeadLetter) -> dict[str, Any]:
    """One line of the list."""
    outcome = letter.outcome
    return {
        "episode": letter.episode_id,
        "component": outcome.component,
        "reason": outcome.reason,
        "kind": str(outcome.kind),
        "attempts": letter.attempts,
        "events": len(letter.journal),
    }


def whole_letter(letter: DeadLetter, decode: Decode | None) -> dict[str, Any]:
    """With what the episode had done, in order."""
    return {**letter_line(letter), "journal": [_event(entry, decode) for entry in letter.journal]}


def _event(entry: JournalEntry, decode: Decode | None) -> dict[str, Any]:
    ids = [] if entry.ids is None else entry.ids.tolist()
    text = decode(ids) if decode is not None else " ".join(map(str, ids))
    return {
        "kind": str(entry.kind),
        "tokens": len(ids),
        "text": text,
        "versions": plain(entry.version_spans) or [],
        "data": plain(entry.data),
    }


def rollout_idle(files: RunFiles, rows: Sequence[Mapping[str, Any]], status: Mapping[str, Any] | None) -> float | None:
    """Share of the agent workers' time for which admission refused episodes; None if it was not counted."""
    if status is None:
        summary = files.end()["summary"]
        status, elapsed_s = {"waits_s": summary.get("wait_s", {})}, float(summary.get("wall_s", 0.0))
    else:  # waits are counted up to now, rows up to the last step
        elapsed_s = sum(row.get("wall_s", 0.0) for row in rows) + files.quiet_s
    # Seconds of whole workers: a worker with half of its slots held back for a second waits half a second.
    waited_s = status.get("waits_s", {}).get("agent:admission")
    workers = max(len(status.get("workers", {})), int(flat(files.config()).get("agent.workers") or 1))
    return min(1.0, waited_s / (workers * elapsed_s)) if waited_s is not None and elapsed_s else None


FRESH_S = 0.5
DEADLINE_S = 20.0
"""Redis on a busy disk may take ten seconds to answer. The page itself waits half a minute."""


class LiveQueues(Protocol):
    """A source of the queues of running runs; owns the connections."""

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
    shown: dict[str, Any] = field(default_factory=dict)
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
            raise NotAlive(f"run {run!r} is not running, or its queue cannot be reached from here")
        return queue

    async def of(self, run: str) -> dict[str, Any]:
        """``alive``, then the status, servers and weight updates if it is true, else the ``cause``."""
        beat = self._beats.setdefault(run, _Beat())
        async with beat.lock:
            if time.monotonic() - beat.at > FRESH_S or not beat.shown:
                beat.shown = await self._ask(run, beat)
                beat.at = time.monotonic()
            return beat.shown

    async def _ask(self, run: str, beat: _Beat) -> dict[str, Any]:
        try:
            async with asyncio.timeout(DEADLINE_S):
                queue = await self.queue(run)
                status, servers = await queue.status(), await queue.servers()
                # Weight updates are asked for less often than the rest: a long run has thousands.
                if time.monotonic() - beat.updates_at > 10.0 or not beat.updates:
                    updates = await queue.updates()
                    pauses_ms = [1000 * update.pause_s for update in updates]
                    p50, p99 = (float(np.percentile(pauses_ms, at)) if pauses_ms else None for at in (50, 99))
                    newest = plain(updates[:-21:-1])  # 20, newest first
                    beat.updates = {"count": len(updates), "pause_ms_p50": p50, "pause_ms_p99": p99, "newest": newest}
                    beat.updates_at = time.monotonic()
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
