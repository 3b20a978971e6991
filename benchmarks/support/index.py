"""The queue's index alone: runs with few and many queued episodes in one Redis, each operation on each run in turn.

Neighbouring samples belong to different runs, so what disturbs the machine disturbs all alike. Payloads are tiny and
groups complete at once, so that what is measured is the scripts. Each round takes as many episodes from every queue as
it puts back, so that the queues keep their lengths.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from benchmarks.support.comparison import say
from benchmarks.support.measure import median_of, microseconds
from benchmarks.support.queue_calls import GROUP_SIZE, TINY, open_queue, tasks
from penstock.transfer_queue import (
    COMPLETED,
    Announcement,
    Batch,
    JournalEntry,
    JournalKind,
    Lease,
    Limits,
    QueueError,
    RedisTransferQueue,
    Trajectory,
)

QUEUED = {"1k": 1_000, "100k": 100_000, "1m": 1_000_000}
"""Run → queued episodes."""
QUEUED_VARIABLE = "PENSTOCK_BENCH_MAX_QUEUED"
PHASES = (
    ("submit",),
    ("lease_episodes",),
    ("journal", "renew", "status", "complete"),
    ("lease_batch", "publish_version", "commit"),
)
"""Of a cycle, in order; operations in one phase follow each other on one episode or step."""
OPERATIONS = [operation for phase in PHASES for operation in phase]
GROUPS_PER_STEP, MAX_STALENESS = 2, 15
GROUPS = GROUPS_PER_STEP * (MAX_STALENESS + 1)
"""Of one cycle: as many as may be in the system at once."""
CYCLES = 8
"""Per round."""
SUBMIT_BATCH = 1_000
ENTRY = JournalEntry(JournalKind.SAMPLED, 8, 1, TINY.response_ids, TINY.response_logprobs, TINY.version_spans)


@dataclass
class Run:
    """One run, and where it stands."""

    name: str
    queue: RedisTransferQueue
    submitted: int = 0
    step: int = 0
    leases: list[Lease] = field(default_factory=list)
    samples: dict[str, list[list[float]]] = field(default_factory=lambda: {name: [] for name in OPERATIONS})
    """Operation → per round, seconds of each call."""


Operation = Callable[[Run, int], Awaitable[Any]]


async def measure_index(url: str, password: str, rounds: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Figures by operation and run, and ratios of p99 between the longest and the shortest queue."""
    runs = [await _fill(url, password, name, count) for name, count in _sizes().items()]
    try:
        for number in range(-1, rounds):  # the first is not counted
            for run in runs if number >= 0 else ():
                for taken in run.samples.values():
                    taken.append([])
            for _ in range(CYCLES):
                await _cycle(runs, keep=number >= 0)
            say(f"index: round {number + 1} of {rounds}")
    finally:
        for run in runs:
            await run.queue.drop_run()
            await run.queue.close()
    return {run.name: _figures(run) for run in runs}, _ratios(runs)


def _sizes() -> dict[str, int]:
    most = int(os.environ.get(QUEUED_VARIABLE, max(QUEUED.values())))
    return {name: min(count, most) for name, count in QUEUED.items()}


async def _fill(url: str, password: str, name: str, episodes: int) -> Run:
    run = Run(name, await open_queue(url, password, f"index-{name}"))
    await run.queue.create_run(Limits(GROUP_SIZE, GROUPS_PER_STEP, MAX_STALENESS, lease_ttl_s=600), "{}")
    groups = episodes // GROUP_SIZE
    while run.submitted < groups:
        count = min(SUBMIT_BATCH, groups - run.submitted)
        await run.queue.submit(tasks(run.submitted, count))
        run.submitted += count
    say(f"index: {episodes} episodes queued")
    return run


async def _cycle(runs: Sequence[Run], *, keep: bool) -> None:
    for run in runs:
        run.leases = []
    for phase in PHASES:
        for number in range(_count(phase)):
            first = number % len(runs)
            for run in [*runs[first:], *runs[:first]]:
                await _sample(run, phase, number, keep=keep)


async def _sample(run: Run, phase: Sequence[str], number: int, *, keep: bool) -> None:
    for operation in phase:
        began = time.perf_counter()
        await _CALLS[operation](run, number)
        took = time.perf_counter() - began
        if keep:
            run.samples[operation][-1].append(took)


def _count(phase: Sequence[str]) -> int:
    """How often per cycle and run: per group, per step or per episode."""
    return {"submit": GROUPS, "lease_batch": MAX_STALENESS + 1}.get(phase[0], GROUPS * GROUP_SIZE)


async def _submit(run: Run, number: int) -> None:
    await run.queue.submit(tasks(run.submitted, 1))
    run.submitted += 1


async def _lease(run: Run, number: int) -> None:
    leases = await run.queue.lease_episodes("bench", 1, run.step)
    if len(leases) != 1:
        raise QueueError(f"run {run.name}: no episode could be leased at version {run.step}")
    run.leases += leases


async def _journal(run: Run, number: int) -> None:
    await run.queue.journal(run.leases[number], ENTRY, 0)


async def _renew(run: Run, number: int) -> None:
    await run.queue.renew([run.leases[number]])


async def _status(run: Run, number: int) -> None:
    await run.queue.status()


async def _complete(run: Run, number: int) -> None:
    lease = run.leases[number]
    segment = replace(TINY, version_spans=np.array([[run.step, 0, 16]], dtype=np.int32))
    await run.queue.complete(
        lease, Trajectory(lease.episode_id, lease.task.task_id, (segment,), float(lease.member), COMPLETED)
    )


async def _lease_batch(run: Run, number: int) -> None:
    batch = await run.queue.lease_batch(run.step)
    if not isinstance(batch, Batch):
        raise QueueError(f"run {run.name}, step {run.step}: {batch.cause}")
    run.step += 1


async def _publish_version(run: Run, number: int) -> None:
    await run.queue.publish_version(Announcement(run.step, {}))


async def _commit(run: Run, number: int) -> None:
    await run.queue.commit(run.step)


_CALLS: dict[str, Operation] = {
    "submit": _submit,
    "lease_episodes": _lease,
    "journal": _journal,
    "renew": _renew,
    "status": _status,
    "complete": _complete,
    "lease_batch": _lease_batch,
    "publish_version": _publish_version,
    "commit": _commit,
}


def _figures(run: Run) -> dict[str, dict[str, float]]:
    return {
        operation: {
            "per_s": round(1 / median(sum(samples) / len(samples) for samples in rounds)),
            "p50_us": microseconds(median_of(rounds, 0.5)),
            "p99_us": microseconds(median_of(rounds, 0.99)),
        }
        for operation, rounds in run.samples.items()
    }


def _ratios(runs: Sequence[Run]) -> dict[str, float]:
    """Per operation, and their geometric mean: one slow operation does not hide what the others do."""
    shortest, longest = runs[0].samples, runs[-1].samples
    ratios = {}
    for share, label in ((0.99, "index_p99_1m_over_1k"), (0.5, "index_p50_1m_over_1k")):
        each = {name: median_of(longest[name], share) / median_of(shortest[name], share) for name in OPERATIONS}
        ratios[label] = math.exp(sum(map(math.log, each.values())) / len(each))
        ratios |= {f"{label}_{name}": value for name, value in each.items()}
    return {name: round(value, 3) for name, value in ratios.items()}
