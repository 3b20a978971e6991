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
Level = Load
"""What is asked for at once."""


@dataclass(frozen=True)
class EngineSide:
    name: str
    child: Child
    server: Server
    question: dict[str, Any]
    """What the child is asked, but the load."""
    owns_engine: bool = False
    """The engine is the child's, not the sidecar's."""

    async def round(self, level: Level) -> Round:
        sidecar = [self.server.pid]
        engine = engine_pids(self.child.pid if self.owns_engine else self.server.pid)
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


def client_side(child: Child, server: Server, engine: str, settings: dict[str, Any], model: str) -> EngineSide:
    return EngineSide("client", child, server, {"do": "client"})


def bare_side(child: Child, server: Server, engine: str, settings: dict[str, Any], model: str) -> EngineSide:
    """The engine process that this server's sidecar started."""
    return EngineSide("bare", child, server, {"do": "bare", "engine": engine, "address": server.address(engine)})


def alone_side(child: Child, server: Server, engine: str, settings: dict[str, Any], model: str) -> EngineSide:
    """A second engine, which the generator owns: this one has no address to be asked at."""
    return EngineSide("bare", child, server, {"do": "alone", "settings": settings, "model": model}, owns_engine=True)


async def generate_side(server: Server, settings: dict[str, Any], model: str) -> EngineSide:
    """`transformers.generate` in a separate process: all requests of a level as one batch."""
    child = await Child.module("benchmarks.support.generate_child", env={"OMP_NUM_THREADS": str(settings["threads"])})
    question = {"do": "generate", "model": model, "dtype": settings["dtype"], "threads": settings["threads"]}
    return EngineSide("generate", child, server, question, owns_engine=True)


async def measure_levels(sides: Sequence[EngineSide], levels: Sequence[Level], rounds: int) -> dict[str, Any]:
    """concurrency → {side → figures, "tokens_over_bare"}. A first round warms up and is not counted."""
    taken: dict[int, dict[str, list[Round]]] = {one.concurrency: {side.name: [] for side in sides} for one in levels}
    for number in range(-1, rounds):
        for level in levels:
            pair = await _turns(sides, replace(level, seed=f"{number}/{level.concurrency}"), number)
            if number >= 0:
                for name, one in pair.items():
                    taken[level.concurrency][name].append(one)
    return {str(many): _cell(by_side) for many, by_side in taken.items()}


async def _turns(sides: Sequence[EngineSide], level: Level, number: int) -> dict[str, Round]:
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
    if "generate" in by_side:
        cell["hf_over_generate"] = round(median(map(_over_generate, by_side["bare"], by_side["generate"])), 3)
    return cell | {
        "tokens_over_bare": round(median(ratios), 3),
        "cpu_over_bare": round(median(cpu), 3),
        "of_each_round": [round(one, 3) for one in ratios],
    }


def _over_generate(engine: Round, generate: Round) -> float:
    """Tokens per CPU second of the engine's process over those of the one that calls `generate`."""
    of_engine = engine.took.tokens / engine.engine_cpu_s
    return of_engine / (generate.took.tokens / generate.took.client_cpu_s)


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
