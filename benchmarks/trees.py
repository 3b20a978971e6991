"""Compares forked episodes with separate ones at as many sampled tokens: reward and held-out evaluation.

    penstock bench trees --json

Two tasks, `sums` (a tool that is called several times) and `rooms` (Sokoban, a move a turn), by two sides:

grpo    groups of eight separate episodes
tree    two of eight begin with the task, each is forked three times at the turn that was least sure; `tree_rl`

A model that `penstock sft` made of the recipe's conversations is trained by both sides on each seed, in equally many
steps. A step of `tree` has `TREE_GROUPS` groups, so that it samples about as many tokens as one of `grpo` with
`GROUPS`; a token that branches share was sampled once. The models are then evaluated on tasks that neither trained on.

A side that has ended is kept, and not run again by the next call. All else about the machine should be quiet.

Environment: PENSTOCK_BENCH_FOLDER (runs/trees), PENSTOCK_BENCH_TASKS (sums,rooms), PENSTOCK_BENCH_SEEDS (0,1,2),
PENSTOCK_BENCH_STEPS (24; rooms 40), PENSTOCK_BENCH_MAX_RUNS (all; the most new runs of this call).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support.child import ROOT
from benchmarks.support.command import run_command
from benchmarks.support.comparison import say
from benchmarks.support.learning_run import LAST, run_environment
from benchmarks.support.measure import processor
from penstock.common import last_by, read_jsonl, write_atomically
from penstock.transfer_queue import Archive

BASE = "recipes/calculator/model"
GROUPS, TREE_GROUPS = 8, 14
SAMPLES = 8
"""Samples of each task in an evaluation."""
GRPO = (f"groups_per_step={GROUPS}", "trainer.advantage=grpo", "agent.forks=null")
TREE = (
    *(f"groups_per_step={TREE_GROUPS}", "trainer.advantage=tree_rl"),
    *("agent.forks.branches=3", "agent.forks.turn=entropy"),
)
SIDES = {"grpo": GRPO, "tree": TREE}


@dataclass(frozen=True)
class Task:
    recipe: str
    data: tuple[str, ...]
    """Module and words that make its data."""
    steps: int


TASKS = {
    "sums": Task("recipes/tree/cpu.yaml", ("penstock.recipes.retool.data", "steps"), 24),
    "rooms": Task("recipes/sokoban/learn.yaml", ("penstock.recipes.sokoban.data",), 40),
}


@dataclass(frozen=True)
class Learned:
    """One side's run of one seed."""

    reward: tuple[float, ...]
    """Mean of each step's episodes."""
    sampled: tuple[int, ...]
    """Tokens that were sampled for the step; those that branches share count once."""
    avg: float
    """Mean reward of the final model on the evaluation's tasks."""
    low: float
    high: float
    """Bounds of its interval."""


Runs = Mapping[tuple[str, str, int], Learned]
"""(task, side, seed) → run"""


def measure() -> dict[str, Any]:
    folder = Path(os.environ.get("PENSTOCK_BENCH_FOLDER", "runs/trees")).resolve()
    tasks = os.environ.get("PENSTOCK_BENCH_TASKS", ",".join(TASKS)).split(",")
    seeds = [int(one) for one in os.environ.get("PENSTOCK_BENCH_SEEDS", "0,1,2").split(",")]
    keys = [(task, side, seed) for seed in seeds for task in tasks for side in SIDES]
    missing = [key for key in keys if not _file(folder, *key).exists()]
    chosen = missing[: int(os.environ.get("PENSTOCK_BENCH_MAX_RUNS", len(missing)))]
    for number, key in enumerate(chosen):
        say(f"trees: run {number + 1} of {len(chosen)}: {', '.join(map(str, key))}")
        _carry_out(folder, *key)
    runs = {key: _kept(file) for key in keys if (file := _file(folder, *key)).exists()}
    setup = {**processor(), "folder": str(folder), "missing": [_name(*key) for key in keys if key not in runs]}
    figures = {_name(*key): _figures(run) for key, run in runs.items()}
    return {"bench": "trees", "ratio": _ratios(runs), "figures": figures, "setup": setup}


def _name(task: str, side: str, seed: int) -> str:
    return f"{task}-{side}-{seed}"


def _file(folder: Path, task: str, side: str, seed: int) -> Path:
    return folder / _name(task, side, seed) / "learned.json"


def _kept(file: Path) -> Learned:
    stored = json.loads(file.read_text())
    return Learned(**stored | {name: tuple(stored[name]) for name in ("reward", "sampled")})


def _carry_out(folder: Path, name: str, side: str, seed: int) -> None:
    task, run = TASKS[name], _name(name, side, seed)
    data = _cold_start(folder, name)
    steps = int(os.environ.get("PENSTOCK_BENCH_STEPS", task.steps))
    for stale in (folder / run, folder / f"{run}-eval"):
        shutil.rmtree(stale, ignore_errors=True)
    settings = (f"name={run}", f"runs_dir={folder}", f"seed={seed}", f"trainer.steps={steps}", *SIDES[side])
    inputs = (f"model={data / 'model'}", f"data.train={data / 'train.parquet'}", "data.eval=null")
    run_command("trees", folder, "run", task.recipe, *settings, *inputs)
    held_out = ("--data", str(data / "eval.parquet"), "--n", str(SAMPLES))
    run_command("trees", folder, "eval", str(folder / run), *held_out)
    (figures,) = json.loads((folder / f"{run}-eval" / "eval.json").read_text())["sources"].values()
    avg = figures[f"avg@{SAMPLES}"]
    rewards = tuple(row["reward"] for row in last_by(read_jsonl(folder / run / "metrics.jsonl"), "step"))
    sampled = _sampled(Archive(folder / run / "archive"), steps)
    learned = Learned(rewards, sampled, avg["value"], avg["low"], avg["high"])
    write_atomically(folder / run / "learned.json", json.dumps(asdict(learned)))


def _cold_start(folder: Path, name: str) -> Path:
    """The folder with the task's data and the model that both sides train."""
    task, data = TASKS[name], folder / f"{name}-data"
    if not (data / "model" / "config.json").exists():
        shutil.rmtree(data, ignore_errors=True)
        command = [sys.executable, "-m", *task.data, "--out", str(data)]
        subprocess.run(command, check=True, cwd=ROOT, env=run_environment(), stdout=sys.stderr)
        shown = (f"sft.messages={data / 'conversations.jsonl'}", f"model={BASE}", f"sft.out={data / 'model'}")
        run_command("trees", folder, "sft", task.recipe, *shown, f"runs_dir={data / 'runs'}")
    return data


def _sampled(archive: Archive, steps: int) -> tuple[int, ...]:
    counts = []
    for step, groups in sorted(archive.batches(0, steps).items()):
        episodes = archive.read(step, [name for group in groups for name in group])
        shared = sum(one.extra["origin"]["sampled"] for one in episodes.values() if "origin" in one.extra)
        counts.append(sum(one.num_sampled for one in episodes.values()) - shared)
    return tuple(counts)


def _figures(run: Learned) -> dict[str, Any]:
    first, last = (sum(rewards) / len(rewards) for rewards in (run.reward[:3], run.reward[-3:]))
    return {
        "first": round(first, 4),
        "last": round(last, 4),
        "sampled_tokens": sum(run.sampled),
        f"avg@{SAMPLES}": [round(one, 4) for one in (run.avg, run.low, run.high)],
    }


def _ratios(runs: Runs) -> dict[str, float | None]:
    """Medians over the seeds that both sides have; None if there is none."""
    ratios: dict[str, float | None] = {}
    for task in TASKS:
        trees = {seed: run for (name, side, seed), run in runs.items() if (name, side) == (task, "tree")}
        pairs = [(run, runs[task, "grpo", seed]) for seed, run in trees.items() if (task, "grpo", seed) in runs]
        ratios |= {
            f"{task}_tree_over_grpo_tokens": _median([sum(one.sampled) / sum(other.sampled) for one, other in pairs]),
            f"{task}_tree_over_grpo_reward": _median([_at_equal_tokens(one, other) for one, other in pairs]),
            f"{task}_tree_over_grpo_avg": _median([one.avg / other.avg for one, other in pairs]),
        }
    return ratios


def _median(values: Sequence[float]) -> float | None:
    return round(median(values), 4) if values else None


def _at_equal_tokens(one: Learned, other: Learned) -> float:
    """Mean reward of the last `LAST` steps up to as many sampled tokens as the shorter run has, over the other's."""
    tokens = min(sum(one.sampled), sum(other.sampled))
    rewards = []
    for run in (one, other):
        until = sum(spent <= tokens for spent in accumulate(run.sampled))
        rewards.append(sum(run.reward[max(0, until - LAST) : until]) / min(LAST, until))
    return rewards[0] / rewards[1]
