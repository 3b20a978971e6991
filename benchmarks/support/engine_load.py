"""The same load through the client and to the bare engine, in rounds that take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from benchmarks.support.child import Child
from benchmarks.support.comparison import in_turn, say
from benchmarks.support.load import Load, Took
from benchmarks.support.rollout_run import Server, cpu_s, engine_pids

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class EngineSide:
    name: str
    child: Child
    server: Server
    question: dict[str, Any]
    """What the child is asked, but the load."""

    async def round(self, level: Load) -> Round:
        sidecar = [self.server.pid]
        engine = engine_pids(self.server.pid)
        before = cpu_s(sidecar), cpu_s(engine)
        answer = await self.child.ask({**self.question, "load": asdict(level)}, TIMEOUT_S)
        return Round(Took(**answer), cpu_s(sidecar) - before[0], cpu_s(engine) - before[1])


@dataclass(frozen=True)
class Round:
    took: Took
    sidecar_cpu_s: float
    engine_cpu_s: float

    @property
    def cpu_s_per_token(self) -> float:
        """Of all that has a part in it."""
        return (self.took.client_cpu_s + self.sidecar_cpu_s + self.engine_cpu_s) / self.took.tokens


async def measure_levels(sides: Sequence[EngineSide], levels: Sequence[Load], rounds: int) -> dict[str, Any]:
    """concurrency → {side → figures, "tokens_over_bare"}. A first round warms up and is not counted."""
    taken: dict[int, dict[str, list[Round]]] = {one.concurrency: {side.name: [] for side in sides} for one in levels}
    for number in range(-1, rounds):
        for level in levels:
            pair = await _turns(sides, replace(level, seed=f"{number}/{level.concurrency}"), number)
            if number >= 0:
                for name, one in pair.items():
                    taken[level.concurrency][name].append(one)
    return {str(many): _cell(by_side) for many, by_side in taken.items()}


async def _turns(sides: Sequence[EngineSide], level: Load, number: int) -> dict[str, Round]:
    """Every side once, each with prompts of its own: none finds in the prefix cache what another left there."""
    pair = {}
    for side in in_turn(sides, number):
        pair[side.name] = await side.round(replace(level, seed=f"{level.seed}/{side.name}"))
    speeds = ", ".join(f"{name} {one.took.tokens_per_s:.0f}" for name, one in sorted(pair.items()))
    say(f"rollout: round {number + 1}, {level.concurrency} at once, tokens/s: {speeds}")
    return pair


def _cell(by_side: dict[str, list[Round]]) -> dict[str, Any]:
    """Ratios are medians of the rounds' own: what slows the machine for a minute slows both sides of a round."""
    pairs = list(zip(by_side["client"], by_side["bare"], strict=True))
    ratios = [client.took.tokens_per_s / bare.took.tokens_per_s for client, bare in pairs]
    cpu = [client.cpu_s_per_token / bare.cpu_s_per_token for client, bare in pairs]
    cell: dict[str, Any] = {name: _figures(rounds) for name, rounds in by_side.items()}
    return cell | {
        "tokens_over_bare": round(median(ratios), 3),
        "cpu_over_bare": round(median(cpu), 3),
        "of_each_round": [round(one, 3) for one in ratios],
    }


def _figures(rounds: Sequence[Round]) -> dict[str, float]:
    def middle(value: Callable[[Round], float]) -> float:
        return median(value(one) for one in rounds)

    return {
        "tokens_per_s": round(middle(lambda one: one.took.tokens_per_s), 1),
        "tokens_per_s_least": round(min(one.took.tokens_per_s for one in rounds), 1),
        "tokens_per_s_most": round(max(one.took.tokens_per_s for one in rounds), 1),
        "first_p50_ms": round(middle(lambda one: one.took.first_p50_s) * 1e3, 1),
        "first_p99_ms": round(middle(lambda one: one.took.first_p99_s) * 1e3, 1),
        "client_cpu_s_per_1000": round(middle(lambda one: one.took.client_cpu_s / one.took.tokens * 1e3), 4),
        "sidecar_cpu_s_per_1000": round(middle(lambda one: one.sidecar_cpu_s / one.took.tokens * 1e3), 4),
        "engine_cpu_s_per_1000": round(middle(lambda one: one.engine_cpu_s / one.took.tokens * 1e3), 4),
    }
