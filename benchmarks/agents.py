"""What one more episode costs an agent worker, with a hundred of them and with ten thousand.

    penstock bench agents --json

A worker process, a Redis queue, an engine and a tool that answer after a log-normal time. The mean time grows with
the number of episodes, so that at every level as many turns end per second and only the number of episodes that wait
differs. Each level has a separate process, each round all levels, in changing order.

    cpu       seconds on a core of the whole worker process (its threads, its Redis client), per turn
    memory    resident bytes of one episode that waits for the model, in the worker that was at work

PENSTOCK_BENCH_EPISODES_AT_ONCE (100,1000,10000), PENSTOCK_BENCH_ROUNDS (3), PENSTOCK_BENCH_TURNS_PER_S (200),
PENSTOCK_BENCH_TURNS_BEFORE (1, of each episode before anything is counted), PENSTOCK_BENCH_SECONDS (30, of measuring at
each level). Ask for fewer turns per second if one core cannot run that many: otherwise calls queue up, and leases
expire.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from benchmarks.support.child import ROOT, Child
from benchmarks.support.comparison import say
from benchmarks.support.measure import processor
from benchmarks.support.slow_world import ANSWER_TOKENS, LAST_TURN, RESULT_CHARS, SIGMA
from penstock.transfer_queue import RedisServer

MODEL = ROOT / "recipes" / "calculator" / "model"
"""Its tokenizer and chat template are used, not its weights."""
Rounds = dict[int, list[dict[str, Any]]]
"""episodes at once → figures of each round"""


def measure() -> dict[str, Any]:
    return uvloop.run(_measure())


@dataclass(frozen=True)
class AgentsExtent:
    """How much is measured, from the environment."""

    levels: list[int]
    rounds: int
    turns_per_s: float
    turns_before: float
    """Of each episode on average, before anything is counted: then all ages are there."""
    seconds: float

    @classmethod
    def read(cls) -> AgentsExtent:
        levels = os.environ.get("PENSTOCK_BENCH_EPISODES_AT_ONCE", "100,1000,10000").split(",")
        return cls(
            sorted(int(level) for level in levels),
            int(os.environ.get("PENSTOCK_BENCH_ROUNDS", "3")),
            float(os.environ.get("PENSTOCK_BENCH_TURNS_PER_S", "200")),
            float(os.environ.get("PENSTOCK_BENCH_TURNS_BEFORE", "1")),
            float(os.environ.get("PENSTOCK_BENCH_SECONDS", "30")),
        )


async def _measure() -> dict[str, Any]:
    extent = AgentsExtent.read()
    setup = {**processor(), **asdict(extent), **_of_the_work()}
    working: Rounds = {level: [] for level in extent.levels}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        password = secrets.token_urlsafe(16)
        async with RedisServer(Path(folder), password) as server:
            for number in range(extent.rounds):
                order = extent.levels if number % 2 == 0 else extent.levels[::-1]
                for level in order:
                    working[level].append(await _one_level(server, password, _at_work(level, extent)))
                    say(f"agents: round {number + 1} of {extent.rounds}, {level} episodes: {working[level][-1]}")
    figures = {f"{level}_episodes": _figures(working[level]) for level in extent.levels}
    bytes_per_idle_episode = figures[f"{extent.levels[-1]}_episodes"]["resident_bytes_per_episode"]
    return {
        "bench": "agents",
        "ratio": _ratios(figures, extent.levels),
        "figures": {"bytes_per_idle_episode": bytes_per_idle_episode, **figures},
        "setup": setup,
    }


def _at_work(level: int, extent: AgentsExtent) -> dict[str, Any]:
    return {
        "episodes": level,
        "turns_per_s": extent.turns_per_s,
        "turns_before": extent.turns_before,
        "warm_up_s": min(5.0, extent.seconds),
        "seconds": extent.seconds,
    }


async def _one_level(server: RedisServer, password: str, question: dict[str, Any]) -> dict[str, Any]:
    environment = {"PENSTOCK_BENCH_PASSWORD": password, "PENSTOCK_LOG": "WARNING"}
    child = await Child.module("benchmarks.support.agents_child", server.url, str(MODEL), env=environment)
    try:
        return await child.ask(question, timeout_s=2400)
    finally:
        await child.stop()


def _figures(working: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the rounds."""
    return {name: round(median(one[name] for one in working), 4) for name in working[0]}


def _ratios(figures: dict[str, Any], levels: list[int]) -> dict[str, float]:
    """Every level over the first one; names as the levels are, ``10k`` for ten thousand."""
    first, ratios = figures[f"{levels[0]}_episodes"], {}
    for level in levels[1:]:
        here, pair = figures[f"{level}_episodes"], f"{_short(level)}_over_{_short(levels[0])}"
        ratios[f"cpu_per_turn_{pair}"] = round(here["cpu_ms_per_turn"] / first["cpu_ms_per_turn"], 3)
    return ratios


def _short(level: int) -> str:
    return f"{level // 1000}k" if level >= 1000 and level % 1000 == 0 else str(level)


def _of_the_work() -> dict[str, Any]:
    return {
        "latency": f"log-normal, sigma {SIGMA}",
        "sampled_tokens_per_turn": ANSWER_TOKENS,
        "tool_result_chars": RESULT_CHARS,
        "turns_per_episode": f"geometric, mean {1 / LAST_TURN:g}",
        "ledger": "redis, a separate process, not counted",
    }
