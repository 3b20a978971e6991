"""What one turn's journal costs, early and late in an episode.

    penstock bench journal --json

A turn is two entries: what the model sampled (256 ids with logprobs) and the results of its tools (1 kB). Episodes are
started one per tick and each takes one turn per tick, so that at every tick an episode at turn 1, one at turn 10 and
one at turn 100 follow each other within milliseconds: what disturbs the machine disturbs all alike.

PENSTOCK_BENCH_ROUNDS sets the rounds (5).
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.support.comparison import say
from benchmarks.support.measure import median_of, microseconds
from benchmarks.support.queue_calls import open_queue, tasks
from penstock.transfer_queue import (
    JournalEntry,
    JournalKind,
    Lease,
    Limits,
    QueueError,
    RedisServer,
    RedisTransferQueue,
    TransferQueue,
)

TURNS = (1, 10, 100)
SAMPLED_TOKENS, RESULT_CHARS = 256, 1_000
EPISODES_PER_ROUND = 100
"""Samples of each turn in `TURNS`; as many episodes again only fill the ticks before."""
ROUNDS = 5


def measure() -> dict[str, Any]:
    return uvloop.run(_measure())


async def _measure() -> dict[str, Any]:
    rounds = int(os.environ.get("PENSTOCK_BENCH_ROUNDS", ROUNDS))
    password = secrets.token_urlsafe(16)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        async with RedisServer(Path(folder), password) as server:
            await _one_round(server.url, password)  # warms up
            taken = []
            for number in range(rounds):
                taken.append(await _one_round(server.url, password))
                say(f"journal: round {number + 1} of {rounds}")
    return {"bench": "journal", "ratio": _ratios(taken), "figures": _figures(taken), "setup": _setup(rounds)}


@dataclass
class JournaledEpisode:
    lease: Lease
    turn: int = 0
    context: int = 0
    entries: int = 0
    """In its journal."""


Samples = dict[int, list[float]]


async def _one_round(url: str, password: str) -> Samples:
    queue = await open_queue(url, password, f"journal-{secrets.token_hex(4)}")
    try:
        return await _staggered(queue, await _lease(queue, EPISODES_PER_ROUND + max(TURNS)))
    finally:
        await queue.drop_run()
        await queue.close()


async def _lease(queue: RedisTransferQueue, count: int) -> list[JournaledEpisode]:
    """Groups of one: nothing but their journals matters."""
    await queue.create_run(Limits(1, count, max_staleness=0, min_group=1, lease_ttl_s=600), "{}")
    await queue.submit(tasks(0, count))
    leases = await queue.lease_episodes("bench", count, 0)
    if len(leases) != count:
        raise QueueError(f"{len(leases)} of {count} episodes could be leased")
    return [JournaledEpisode(lease) for lease in leases]


async def _staggered(queue: TransferQueue, episodes: Sequence[JournaledEpisode]) -> Samples:
    """Samples of the ticks at which all turns are present."""
    samples: Samples = {turn: [] for turn in TURNS}
    for tick in range(1, len(episodes) + 1):
        for episode in episodes[max(0, tick - max(TURNS)) : tick]:
            took = await _take_turn(queue, episode)
            if tick > max(TURNS) and episode.turn in samples:
                samples[episode.turn].append(took)
    return samples


async def _take_turn(queue: TransferQueue, episode: JournaledEpisode) -> float:
    episode.turn += 1
    episode.context += SAMPLED_TOKENS
    entries = _entries(episode)
    began = time.perf_counter()
    for entry in entries:
        await queue.journal(episode.lease, entry, episode.entries)
        episode.entries += 1
    return time.perf_counter() - began


def _entries(episode: JournaledEpisode) -> list[JournalEntry]:
    ids = np.arange(SAMPLED_TOKENS, dtype=np.int32)
    sampled = JournalEntry(
        JournalKind.SAMPLED,
        context_len=episode.context,
        context_hash=episode.context,
        ids=ids,
        logprobs=np.full(SAMPLED_TOKENS, -0.5, dtype=np.float32),
        version_spans=np.array([[0, 0, SAMPLED_TOKENS]], dtype=np.int32),
        data={"finish_reason": "tool_calls"},
    )
    results = JournalEntry(
        JournalKind.TOOLS, data={"results": ["x" * RESULT_CHARS], "sandbox_session": f"session-{episode.turn}"}
    )
    return [sampled, results]


def _figures(rounds: Sequence[Samples]) -> dict[str, dict[str, float]]:
    return {
        f"turn_{turn}": {
            "p50_us": microseconds(median_of([samples[turn] for samples in rounds], 0.5)),
            "p99_us": microseconds(median_of([samples[turn] for samples in rounds], 0.99)),
        }
        for turn in TURNS
    }


def _ratios(rounds: Sequence[Samples]) -> dict[str, float]:
    """Of the medians of the rounds' medians."""
    cost = {turn: median_of([samples[turn] for samples in rounds], 0.5) for turn in TURNS}
    return {f"journal_turn{turn}_over_turn1": round(cost[turn] / cost[1], 3) for turn in TURNS[1:]}


def _setup(rounds: int) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "samples_per_turn_and_round": EPISODES_PER_ROUND,
        "sampled_tokens_per_turn": SAMPLED_TOKENS,
        "tool_result_chars_per_turn": RESULT_CHARS,
        "appendfsync": "everysec",
    }
