"""Figures of the runs of `penstock bench compare`, by side, and their ratios."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.support.compare_run import Progress

FULLY_ASYNC, TRL, TRL_IN_PROCESS = "fully_async", "trl", "trl_in_process"
Runs = Mapping[str, Mapping[int, Progress]]
"""Side → seed → run"""

ROUNDED: Mapping[str, Callable[[Progress], float]] = {
    "wall_s": lambda run: round(run.wall_s, 2),
    "cpu_s": lambda run: round(run.cpu_s, 2),
    "cpu_end_s": lambda run: round(run.cpu_end_s, 2),
    "cpu_per_step": lambda run: round(run.cpu_per_step, 3),
    "cpu_per_later_step": lambda run: round(run.cpu_per_later_step, 3),
    "first_step_s": lambda run: round(run.steps[0].wall_s, 2),
    "cpu_first_step_s": lambda run: round(run.cpu_first_s, 2),
    "steps": lambda run: len(run.steps),
    "episodes": lambda run: run.episodes,
    "sampled_tokens": lambda run: run.sampled_tokens,
}


def figures_of(runs: Runs) -> dict[str, dict[str, Any]]:
    """Side → medians over its seeds, and each seed's numbers."""
    return {name: _side(list(of_side.items())) for name, of_side in runs.items() if of_side}


def _side(runs: Sequence[tuple[int, Progress]]) -> dict[str, Any]:
    seeds = {
        str(seed): {
            "reached": run.reached,
            **{name: of(run) for name, of in ROUNDED.items()},
            "rewards": [round(step.reward, 4) for step in run.steps],
            "walls_s": [round(step.wall_s, 2) for step in run.steps],
        }
        for seed, run in runs
    }
    medians = {name: median(of(run) for _, run in runs) for name, of in ROUNDED.items()}
    return {"reached": sum(run.reached for _, run in runs), **medians, "seeds": seeds}


def ratios_of(runs: Runs) -> dict[str, float | None]:
    """Medians over the seeds that both sides have of each seed's own ratio.

    None: a side is missing, or ours did not reach the goal on a seed. A time to the goal is of the seeds on which TRL
    reached it.
    """
    return {
        f"{name}_{suffix}": _over(runs, theirs, of)
        for theirs, suffix in ((TRL, "over_trl"), (TRL_IN_PROCESS, "over_trl_in_process"))
        for name, of in COMPARED.items()
    }


COMPARED: Mapping[str, Callable[[Progress], float | None]] = {
    "cpu_per_step": lambda run: run.cpu_per_step,
    "cpu_per_later_step": lambda run: run.cpu_per_later_step if len(run.steps) > 1 else None,
    "cpu_to_goal": lambda run: run.cpu_s if run.reached else None,
    "wall_to_goal": lambda run: run.wall_s if run.reached else None,
}


def _over(runs: Runs, theirs: str, of: Callable[[Progress], float | None]) -> float | None:
    ratios = []
    for seed, run in runs.get(FULLY_ASYNC, {}).items():
        other = runs.get(theirs, {}).get(seed)
        if other is None:
            continue
        mine, base = of(run), of(other)
        if mine is None:
            return None
        if base is not None:
            ratios.append(mine / base)
    return round(median(ratios), 3) if ratios else None
