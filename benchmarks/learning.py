"""How fast and how well runs of several stalenesses learn.

    penstock bench learning --json

Each run is a `penstock run` of a recipe: Redis, a rollout server, agent workers, a trainer. The tool of
recipes/calculator.yaml is one far away (`support.far_python`) that answers after a log-normal time. max_staleness 0, 1
and 2 are the modes sync, one_step_off and fully_async; each is run with the recipe's correction and with none, on
several seeds.

A run that has ended is kept, and not run again by the next call: a sweep can be done in pieces. Figures and ratios are
of the runs that are there; a ratio whose runs are not is null. All else about the machine should be quiet.

Environment: PENSTOCK_BENCH_RECIPE (recipes/calculator.yaml), PENSTOCK_BENCH_PICTURE (a file, .svg or .png: rewards
against steps, tokens and seconds), PENSTOCK_BENCH_FOLDER (runs/learning), PENSTOCK_BENCH_STALENESS (0,1,2,4,8),
PENSTOCK_BENCH_CORRECTIONS (truncated_is,none), PENSTOCK_BENCH_SEEDS (0,1,2), PENSTOCK_BENCH_MAX_RUNS (all; the most new
runs of this call), PENSTOCK_BENCH_STEPS (50), PENSTOCK_BENCH_GROUPS and PENSTOCK_BENCH_GROUP_SIZE (8 each),
PENSTOCK_BENCH_TOOL_MEDIAN_S (0.5), PENSTOCK_BENCH_TOOL_SIGMA (1.0), PENSTOCK_BENCH_TOOL_LONGEST_S (30 medians),
PENSTOCK_BENCH_WORKER_CONCURRENCY (agent.concurrency; default: all that admission lets in), PENSTOCK_BENCH_ENGINE (hf),
PENSTOCK_BENCH_RUN_TIMEOUT_S (3600).
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.support.comparison import say
from benchmarks.support.learning_picture import curves_by_label, draw_curves
from benchmarks.support.learning_run import (
    CALCULATOR,
    Common,
    Curve,
    LearningRun,
    carry_out,
    figures_of,
    finished,
    ratios_of,
    reward_at_end,
)
from benchmarks.support.measure import processor


class SweepGoesOn(Exception):
    """Another process carries runs out in the same folder."""


def measure() -> dict[str, Any]:
    common, runs = _common(), wanted()
    folder = Path(_read("FOLDER", "runs/learning")).resolve() / common.digest()
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        curves = _curves(runs, common, folder)
    if picture := _read("PICTURE", ""):
        draw_curves(curves_by_label(curves), "max_staleness", Path(picture))
    setup = {**asdict(common), **processor(), "folder": str(folder)}
    setup |= {"runs": len(runs), "missing": [run.name for run in runs if run not in curves]}
    return {"bench": "learning", "ratio": ratios_of(curves), "figures": figures_of(curves), "setup": setup}


def wanted() -> list[LearningRun]:
    """Seed by seed: whoever stops early has each cell once. What the ratios need comes first."""
    stalenesses = [int(one) for one in _read("STALENESS", "0,1,2,4,8").split(",")]
    corrections = _read("CORRECTIONS", "truncated_is,none").split(",")
    seeds = [int(one) for one in _read("SEEDS", "0,1,2").split(",")]
    first = [one for one in (0, 2, 4) if one in stalenesses]
    order = [*first, *(one for one in stalenesses if one not in first)]
    return [LearningRun(age, correction, seed) for seed in seeds for correction in corrections for age in order]


def _curves(runs: list[LearningRun], common: Common, folder: Path) -> dict[LearningRun, Curve]:
    """Of all runs that are kept, after as many new ones as this call may carry out."""
    kept = {run: curve for run in runs if (curve := finished(run, folder)) is not None}
    missing = [run for run in runs if run not in kept]
    chosen = missing[: int(_read("MAX_RUNS", str(len(missing))))]
    say(f"learning: {len(kept)} of {len(runs)} runs are there; {len(chosen)} now, into {folder}")
    for number, run in enumerate(chosen):
        began = time.monotonic()
        kept[run] = carry_out(run, common, folder)
        took = time.monotonic() - began
        say(
            f"learning: {number + 1} of {len(chosen)}: {run.name} ended with reward {reward_at_end(kept[run]):.3f} "
            f"in {kept[run].wall_s[-1]:.0f} s ({took:.0f} s with start and stop)"
        )
    return {run: kept[run] for run in runs if run in kept}


def _common() -> Common:
    return Common(
        engine=_read("ENGINE", "hf"),
        steps=int(_read("STEPS", "50")),
        groups=int(_read("GROUPS", "8")),
        group_size=int(_read("GROUP_SIZE", "8")),
        tool_median_s=float(_read("TOOL_MEDIAN_S", "0.5")),
        tool_sigma=float(_read("TOOL_SIGMA", "1.0")),
        timeout_s=float(_read("RUN_TIMEOUT_S", "3600")),
        tool_longest_s=float(_read("TOOL_LONGEST_S", "0")) or None,
        concurrency=int(_read("WORKER_CONCURRENCY", "0")) or None,
        recipe=_read("RECIPE", CALCULATOR),
    )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """The operating system lets go when this process dies. Raises `SweepGoesOn`."""
    with (folder / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SweepGoesOn(f"another process carries runs out in {folder}") from None
        yield


def _read(name: str, default: str) -> str:
    return os.environ.get(f"PENSTOCK_BENCH_{name}", default)
