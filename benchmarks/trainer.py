"""Packed training step compared with a padded loop over the transformers model: tokens/s and memory.

    penstock bench trainer --json

packed             pack, advantages, loss, update: `trainer.learner` with the engine fsdp, as a run has them
padded             a plain loop over the transformers model: rows of similar length together, padded, all logits
tree               an episode of 20 turns whose template strips thinking: its rows in one tree, and apart
experts            ranks that share out a mixture's experts: the most memory of one in a backward, bytes of all-to-alls
context            a long row whose tokens two ranks share out, and the same row on one of them
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
from benchmarks.support.model import MIXTURE, SIZES, Size, save_mixture, save_model
from benchmarks.support.work import Work, log_normal_lengths

PROMPT_TOKENS = 32
STEP_TIMEOUT_S = 3600.0
LOAD_RANKS = 4
CHILD_TIMEOUT_S = 900.0
EXPERT_RANKS = 4
EXPERT_TOKENS = 24
"""Tokens of a pack, few: the experts are nearly all that a rank holds."""
CONTEXT_TOKENS = 2048


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
        figures["context"] = await asyncio.to_thread(context_step, Path(folder), extent.rounds)
    figures["experts"] = await asyncio.to_thread(shared_experts)
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
    figures: dict[str, Any] = _printed("tree_step", model, rounds)
    return figures


def context_step(model: Path, rounds: int) -> dict[str, Any]:
    """The time of a step on one row of `CONTEXT_TOKENS` over two ranks, and on one of them."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        figures: dict[str, Any] = _printed("context_step", model, CONTEXT_TOKENS, rounds, folder)
    return figures


def shared_experts() -> dict[str, Any]:
    """The memory of a rank of `EXPERT_RANKS` in a backward of a mixture, by trainer.parallel.expert.

    `peak_over_share`: what it holds above its gradients, over an E-th of what it holds where FSDP gathers all experts
    of a layer; `exchanged_over_formula`: bytes of all-to-alls over tokens · layers · k · hidden · 4, in float32.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        model = save_mixture(Path(name) / "model")
        layouts = {str(expert): {"parallel": {"expert": expert}} for expert in (1, 2, EXPERT_RANKS)}
        cases = {key: {"model": model, "config": config, "tokens": EXPERT_TOKENS} for key, config in layouts.items()}
        printed = _python(ROOT / "tests/trainer/memory_ranks.py", EXPERT_RANKS, name, json.dumps(cases))
    by_expert = json.loads(printed.splitlines()[-1])["cases"]
    numbers = MIXTURE["num_hidden_layers"] * MIXTURE["num_experts_per_tok"] * MIXTURE["hidden_size"] * 4
    formula = numbers * 4 * 2 * EXPERT_TOKENS * EXPERT_RANKS  # bytes of float32, packs, tokens, ranks
    whole, *parts = (case["peak_bytes"] - case["shard_bytes"] for case in by_expert.values())
    exchanged = [case["exchanged_bytes"] for case in list(by_expert.values())[1:]]
    return {
        "by_expert": by_expert,
        "peak_over_share": max(int(e) * part / whole for e, part in zip(list(by_expert)[1:], parts, strict=True)),
        "exchanged_over_formula": max((one / formula for one in exchanged), key=lambda one: abs(one - 1)),
    }


def _printed(name: str, *arguments: object) -> Any:
    """Run a module of `support`; returns the JSON of the last line that it prints."""
    return json.loads(_module(name, *arguments).splitlines()[-1])


def _module(name: str, *arguments: object) -> str:
    """Run a module of `support`; returns what it prints."""
    return _python("-m", f"benchmarks.support.{name}", *arguments)


def _python(*arguments: object) -> str:
    """Run a program on one thread; returns what it prints."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, *map(str, arguments)]
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
    tree, context, experts = (figures[name] for name in ("tree", "context", "experts"))

    def over(rounds: str) -> float:
        return _median_ratio(packed[rounds], padded[rounds])

    return {
        "tokens_over_padded_loop": over("tokens_per_s_rounds"),
        "cpu_tokens_over_padded_loop": over("tokens_per_cpu_s_rounds"),
        "tree_tokens_over_longest": round(tree["computed"] / tree["longest"], 3),
        "tree_step_over_rows_apart": _median_ratio(tree["cpu_s"]["tree"], tree["cpu_s"]["apart"]),
        "context_over_single": _median_ratio(context["seconds"]["context"], context["seconds"]["single"]),
        "cpu_context_over_single": _median_ratio(context["cpu_s"]["context"], context["cpu_s"]["single"]),
        "expert_peak_over_share": round(experts["peak_over_share"], 3),
        "expert_bytes_over_formula": round(experts["exchanged_over_formula"], 3),
        "load_peak_over_shard": figures["start"]["load_peak_over_shard"],
        "peak_over_padded_loop": round(packed["step_peak_mb"] / padded["step_peak_mb"], 3),
    }


def _median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return round(median(map(truediv, ours, theirs)), 3)
