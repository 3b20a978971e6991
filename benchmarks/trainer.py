"""Packed training step compared with a padded loop over the transformers model: tokens/s and memory.

    penstock bench trainer --json

packed             pack, advantages, loss, update: `trainer.learner` with the engine fsdp, as a run has them
padded             a plain loop over the transformers model: rows of similar length together, padded, all logits
tree               an episode of 20 turns whose template strips thinking: its rows in one tree, and apart
start              ranks that load a larger model: the most memory that one needs, over the bytes of its shard

One model, one batch of log-normal lengths, one update per step, on every side the same gradient (figure `grad_norm`).
Each side is a separate process; they train in turn, in changing order. A token counts once, padding never.

Environment: PENSTOCK_BENCH_ROUNDS (3), PENSTOCK_BENCH_MODEL (9m; a name of `support.model.SIZES`),
PENSTOCK_BENCH_DTYPE (float32), PENSTOCK_BENCH_THREADS (1), PENSTOCK_BENCH_ROWS (32), PENSTOCK_BENCH_MEAN_TOKENS (128),
PENSTOCK_BENCH_SIGMA (1.0), PENSTOCK_BENCH_MICRO_ROWS (8), PENSTOCK_BENCH_MICRO_TOKENS (2048),
PENSTOCK_BENCH_LOAD_MODEL (100m).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support.child import ROOT, Child
from benchmarks.support.comparison import in_turn, say
from benchmarks.support.measure import peaks_mb, processor
from benchmarks.support.model import SIZES, Size, save_model
from benchmarks.support.work import Work, log_normal_lengths

PROMPT_TOKENS = 32
STEP_TIMEOUT_S = 3600.0
LOAD_RANKS = 4
CHILD_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class TrainerExtent:
    """How much is measured, from the environment."""

    rounds: int
    model: str
    dtype: str
    threads: int
    rows: int
    mean_tokens: float
    sigma: float
    micro_rows: int
    micro_tokens: int
    load_model: str

    @classmethod
    def read(cls) -> TrainerExtent:
        return cls(
            rounds=int(_read("ROUNDS", "3")),
            model=_read("MODEL", "9m"),
            dtype=_read("DTYPE", "float32"),
            threads=int(_read("THREADS", "1")),
            rows=int(_read("ROWS", "32")),
            mean_tokens=float(_read("MEAN_TOKENS", "128")),
            sigma=float(_read("SIGMA", "1.0")),
            micro_rows=int(_read("MICRO_ROWS", "8")),
            micro_tokens=int(_read("MICRO_TOKENS", "2048")),
            load_model=_read("LOAD_MODEL", "100m"),
        )

    @property
    def size(self) -> Any:
        return SIZES[self.model]

    def work(self) -> Work:
        """The batch that all sides train on."""
        longest = min(self.size.context, 16 * round(self.mean_tokens)) - PROMPT_TOKENS
        lengths = log_normal_lengths(self.rows, self.mean_tokens, self.sigma, longest)
        return Work(lengths, PROMPT_TOKENS, self.size.vocab)


def _read(name: str, default: str) -> str:
    return os.environ.get(f"PENSTOCK_BENCH_{name}", default)


def measure() -> dict[str, Any]:
    return asyncio.run(_measure(TrainerExtent.read()))


async def _measure(extent: TrainerExtent) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    setup = {**asdict(extent), **processor(), "prompt_tokens": PROMPT_TOKENS}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        setup["values"] = save_model(extent.size, Path(folder), "float32")
        async with AsyncExitStack() as stack:
            sides = await _sides(extent, folder, stack)
            figures["batch"] = await _compare(sides, extent)
        figures["tree"] = await asyncio.to_thread(tree_step, Path(folder), extent.rounds)
    figures["start"] = await asyncio.to_thread(starts, SIZES[extent.load_model])
    return {"bench": "trainer", "ratio": _ratios(figures), "figures": figures, "setup": setup}


def starts(size: Size) -> dict[str, Any]:
    """What each of `LOAD_RANKS` ranks needs to start with a model of this size in float32, in bytes."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        save_model(size, folder / "model", "float32")
        _module("load_peak", folder / "model", LOAD_RANKS, folder)
        ranks = [json.loads((folder / f"peak_{rank}.json").read_text()) for rank in range(LOAD_RANKS)]
    return {
        "ranks": ranks,
        "load_peak_over_shard": round(max(one["peak_bytes"] / one["shard_bytes"] for one in ranks), 3),
    }


def tree_step(model: Path, rounds: int) -> dict[str, Any]:
    """The tokens that a tree computes, and the time of a step on a core, in the tree and with its rows apart."""
    figures: dict[str, Any] = json.loads(_module("tree_step", model, rounds).splitlines()[-1])
    return figures


def _module(name: str, *arguments: object) -> str:
    """Run a module of `support` on one thread; returns what it prints."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", f"benchmarks.support.{name}", *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, check=True, timeout=CHILD_TIMEOUT_S, stdout=subprocess.PIPE, text=True)
    return done.stdout


@dataclass
class TrainerSide:
    """A child that trains, and what its steps took."""

    name: str
    child: Child
    steps: list[dict[str, Any]] = field(default_factory=list)

    async def load(self, work: Work) -> None:
        await self.child.ask({"do": "load", "work": work.dump()}, STEP_TIMEOUT_S)

    async def step(self, *, memory: bool = False) -> dict[str, Any]:
        return await self.child.ask({"do": "step", "memory": memory}, STEP_TIMEOUT_S)


async def _sides(extent: TrainerExtent, model: str, stack: AsyncExitStack) -> list[TrainerSide]:
    settings = json.dumps(
        {"model": model, "dtype": extent.dtype, "micro_rows": extent.micro_rows, "micro_tokens": extent.micro_tokens}
    )
    env = {"OMP_NUM_THREADS": str(extent.threads), "MKL_NUM_THREADS": str(extent.threads)}
    sides = []
    for name in ("packed", "padded"):
        child = await Child.module("benchmarks.support.trainer_child", name, settings, env=env)
        stack.push_async_callback(child.stop)
        sides.append(TrainerSide(name, child))
    return sides


async def _compare(sides: Sequence[TrainerSide], extent: TrainerExtent) -> dict[str, Any]:
    """One unmeasured step each, whose gradients must agree; then rounds in which each side trains once."""
    work = extent.work()
    first = {}
    for side in sides:
        await side.load(work)
        first[side.name] = await side.step()
    for number in range(extent.rounds):
        for side in in_turn(sides, number):
            side.steps.append(await side.step())
            rate = work.tokens / side.steps[-1]["seconds"]
            say(f"trainer: round {number + 1} of {extent.rounds}, {side.name}: {rate:.0f} tokens/s")
    cells = {side.name: await _cell(side, work, first[side.name]) for side in sides}
    return {"tokens": work.tokens, "longest": max(work.lengths), "sides": cells}


async def _cell(side: TrainerSide, work: Work, first: Mapping[str, Any]) -> dict[str, Any]:
    rates, on_core = ([work.tokens / one[name] for one in side.steps] for name in ("seconds", "cpu_s"))
    resident = sum(peaks_mb([side.child.pid]).values())
    peak = (await side.step(memory=True))["peak_bytes"]
    return {
        "tokens_per_s": round(median(rates), 1),
        "tokens_per_s_rounds": [round(rate, 1) for rate in rates],
        "tokens_per_cpu_s_rounds": [round(rate, 1) for rate in on_core],
        "grad_norm": first["grad_norm"],
        "tokens_computed": first["tokens_computed"],
        "step_peak_mb": round(peak / 1e6, 1),
        "peak_rss_mb": resident,
    }


def _ratios(figures: Mapping[str, Any]) -> dict[str, float]:
    """Throughput by the clock and by time on a core: each round's own ratio, then the median over the rounds."""
    packed, padded = (figures["batch"]["sides"][name] for name in ("packed", "padded"))
    tree = figures["tree"]

    def over(rounds: str) -> float:
        return round(median(a / b for a, b in zip(packed[rounds], padded[rounds], strict=True)), 3)

    return {
        "tokens_over_padded_loop": over("tokens_per_s_rounds"),
        "cpu_tokens_over_padded_loop": over("tokens_per_cpu_s_rounds"),
        "tree_tokens_over_longest": round(tree["computed"] / tree["longest"], 3),
        "tree_step_over_rows_apart": round(median(map(truediv, tree["cpu_s"]["tree"], tree["cpu_s"]["apart"])), 3),
        "load_peak_over_shard": figures["start"]["load_peak_over_shard"],
        "peak_over_padded_loop": round(packed["step_peak_mb"] / padded["step_peak_mb"], 3),
    }
