"""What the runs of `penstock bench compare` come to: figures by side, ratios, and a picture of their rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support.compare_run import Progress
from benchmarks.support.grpo_plan import GOAL, WINDOW
from benchmarks.support.learning_run import smoothed

TRL_IN_PROCESS, TRL_BWRAP = "trl_in_process", "trl_bwrap"
FULLY_ASYNC, SYNC = "fully_async", "sync"
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
    "waited_per_step_s": lambda run: round(median(step.waited_s for step in run.steps), 3),
    "trained_per_step_s": lambda run: round(median(step.trained_s for step in run.steps), 3),
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
            "by_process": {name: round(spent, 2) for name, spent in run.by_process.items()},
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
    found: dict[str, float | None] = {}
    for ours, prefix in ((FULLY_ASYNC, ""), (SYNC, "sync_")):
        for theirs, suffix in ((TRL_BWRAP, "over_trl"), (TRL_IN_PROCESS, "over_trl_in_process")):
            found[f"{prefix}cpu_per_step_{suffix}"] = _over(runs, ours, theirs, _cpu_per_step)
            found[f"{prefix}cpu_per_later_step_{suffix}"] = _over(runs, ours, theirs, _cpu_per_later_step)
            found[f"{prefix}cpu_to_{GOAL}_{suffix}"] = _over(runs, ours, theirs, _cpu_to_goal)
            found[f"{prefix}wall_to_{GOAL}_{suffix}"] = _over(runs, ours, theirs, _wall_to_goal)
    found[f"async_over_sync_wall_to_{GOAL}"] = _over(runs, FULLY_ASYNC, SYNC, _wall_to_goal)
    found["samples_over_ideal"] = _samples_over_ideal(runs)
    return found


PREPARED = 3
"""First steps of a `fully_async` run whose episodes were under way, or over, before the first step ended."""


def _samples_over_ideal(runs: Runs) -> float | None:
    """Episodes per second of `fully_async`, over the smaller of what rollouts alone and training alone can do.

    Both are read from the same seed's `sync` run, where either rests while the other works.
    """
    ratios = []
    for seed, run in runs.get(FULLY_ASYNC, {}).items():
        alone = runs.get(SYNC, {}).get(seed)
        if alone is not None and len(run.steps) > PREPARED + 1 and len(alone.steps) > 1:
            ratios.append(_samples_per_s(run) * max(_seconds_alone(alone)))
    return round(median(ratios), 3) if ratios else None


def _samples_per_s(run: Progress) -> float:
    later = run.steps[PREPARED + 1 :]
    return sum(step.episodes for step in later) / (later[-1].wall_s - run.steps[PREPARED].wall_s)


def _seconds_alone(run: Progress) -> tuple[float, float]:
    """Per episode: of rollouts, of training; medians over the steps after the first."""
    later = run.steps[1:]
    return (
        median(step.waited_s / step.episodes for step in later),
        median(step.trained_s / step.episodes for step in later),
    )


def _cpu_per_step(run: Progress) -> float | None:
    return run.cpu_per_step


def _cpu_per_later_step(run: Progress) -> float | None:
    return run.cpu_per_later_step if len(run.steps) > 1 else None


def _cpu_to_goal(run: Progress) -> float | None:
    return run.cpu_s if run.reached else None


def _wall_to_goal(run: Progress) -> float | None:
    return run.wall_s if run.reached else None


def _over(runs: Runs, ours: str, theirs: str, of: Callable[[Progress], float | None]) -> float | None:
    ratios = []
    for seed, run in runs.get(ours, {}).items():
        other = runs.get(theirs, {}).get(seed)
        if other is None:
            continue
        mine, base = of(run), of(other)
        if mine is None:
            return None
        if base is not None:
            ratios.append(mine / base)
    return round(median(ratios), 3) if ratios else None


LABELS = {
    TRL_IN_PROCESS: ("C3", "TRL, tool in its process"),
    TRL_BWRAP: ("C1", "TRL, a bwrap per call"),
    FULLY_ASYNC: ("C0", "Penstock, fully_async"),
    SYNC: ("C2", "Penstock, sync"),
}


def draw(runs: Runs, path: Path) -> None:
    """Reward against the seconds since each program was started; a point where it has reached the goal."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name, of_side in runs.items():
        color, label = LABELS[name]
        for number, run in enumerate(of_side.values()):
            text = f"{label} ({len(of_side)} seed{'s' * (len(of_side) != 1)})" if number == 0 else None
            _draw_run(axes, run, color, text)
    axes.axhline(GOAL, color="grey", linewidth=0.6, linestyle=":")
    axes.set(xlabel="seconds since the start", ylabel=f"reward, mean of {WINDOW} steps", xlim=(0, None), ylim=(0, 1.05))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_run(axes: Any, run: Progress, color: str, label: str | None) -> None:
    walls = [step.wall_s for step in run.steps]
    axes.plot(walls, smoothed([step.reward for step in run.steps]), color=color, linewidth=1.2, label=label)
    if run.reached:
        axes.plot(walls[-1:], [GOAL], "o", color=color, markersize=4)
