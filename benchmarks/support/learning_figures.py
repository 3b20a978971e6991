"""What runs of several seeds come to: time to a reward, the reward at the end, the plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from benchmarks.support.learning_run import NONE, Curve, LearningRun

GOAL = 0.9
WINDOW = 3
"""Steps over which a reward is averaged before it counts as reached: one lucky batch is not learning."""
LAST = 5
"""Steps at the end whose mean is what a run ends with."""
CORRECTED = "truncated_is"
Curves = Mapping[LearningRun, Curve]


def smoothed(rewards: Sequence[float]) -> list[float]:
    """Trailing means over `WINDOW` steps, fewer at the start."""
    return [mean(rewards[max(0, end - WINDOW) : end]) for end in range(1, len(rewards) + 1)]


def wall_to(curve: Curve, goal: float = GOAL) -> float | None:
    """Seconds until the smoothed reward first was `goal`, at full windows; None where it never was."""
    rewards = smoothed(curve.reward)
    return next(
        (wall for wall, one in list(zip(curve.wall_s, rewards, strict=True))[WINDOW - 1 :] if one >= goal), None
    )


def reward_at_end(curve: Curve) -> float:
    return mean(curve.reward[-LAST:])


def figures_of(curves: Curves) -> dict[str, dict[str, Any]]:
    """``staleness_4`` → correction → figures over its seeds."""
    found: dict[str, dict[str, Any]] = {}
    cells = sorted({(run.staleness, run.correction) for run in curves}, key=lambda cell: (cell[0], cell[1] == NONE))
    for staleness, correction in cells:
        own = [curve for run, curve in curves.items() if (run.staleness, run.correction) == (staleness, correction)]
        found.setdefault(f"staleness_{staleness}", {})[correction] = _cell(own)
    return found


def _cell(curves: Sequence[Curve]) -> dict[str, Any]:
    ends = [reward_at_end(curve) for curve in curves]
    reached = [wall for wall in map(wall_to, curves) if wall is not None]
    return {
        "seeds": len(curves),
        "reward_at_end": round(mean(ends), 4),
        "reward_at_end_deviation": round(stdev(ends), 4) if len(ends) > 1 else None,
        "reward_at_end_least": round(min(ends), 4),
        "seeds_that_reached_0.9": len(reached),
        "wall_to_0.9_s": round(median(reached), 1) if reached else None,
        "wall_s": round(median(curve.wall_s[-1] for curve in curves), 1),
        "waited_share": round(mean(sum(curve.waited_s) / curve.wall_s[-1] for curve in curves), 3),
        "staleness_mean": round(mean(mean(curve.staleness) for curve in curves), 3),
    }


def ratios_of(curves: Curves) -> dict[str, float | None]:
    """Medians over the seeds that both sides have; None where there is none, or one side never reached the goal."""
    return {
        "async_over_sync_wall_to_0.9": _over(curves, (2, CORRECTED), wall_to),
        "one_step_off_over_sync_wall_to_0.9": _over(curves, (1, CORRECTED), wall_to),
        "corrected4_over_sync_reward": _over(curves, (4, CORRECTED), reward_at_end),
        "uncorrected4_over_sync_reward": _over(curves, (4, NONE), reward_at_end),
    }


def _over(curves: Curves, cell: tuple[int, str], of: Any) -> float | None:
    ratios = []
    for run, curve in curves.items():
        sync = curves.get(LearningRun(0, CORRECTED, run.seed))
        if (run.staleness, run.correction) == cell and sync is not None:
            mine, base = of(curve), of(sync)
            if mine is None or base is None:
                return None
            ratios.append(mine / base)
    return round(median(ratios), 3) if ratios else None


def draw(curves: Curves, path: Path) -> None:
    """Left: reward against wall clock by mode. Right: reward at the end against staleness, corrected and not."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 2))
    _draw_modes(left, curves)
    _draw_staleness(right, curves)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def _draw_modes(axes: Any, curves: Curves) -> None:
    for staleness, label in ((0, "sync"), (1, "one_step_off"), (2, "fully_async")):
        own = [c for run, c in curves.items() if (run.staleness, run.correction) == (staleness, CORRECTED)]
        for number, curve in enumerate(own):
            axes.plot(
                curve.wall_s,
                smoothed(curve.reward),
                color=f"C{staleness}",
                linewidth=1.2,
                label=f"{label} ({len(own)} seed{'s' * (len(own) != 1)})" if number == 0 else None,
            )
    axes.axhline(GOAL, color="grey", linewidth=0.6, linestyle=":")
    axes.set(xlabel="seconds", ylabel=f"reward, mean of {WINDOW} steps", ylim=(0, 1.05))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right")


def _draw_staleness(axes: Any, curves: Curves) -> None:
    for color, correction, label in (("C0", CORRECTED, "corrected"), ("C3", NONE, "not corrected")):
        own = sorted((run.staleness, reward_at_end(c)) for run, c in curves.items() if run.correction == correction)
        if not own:
            continue
        axes.plot([at for at, _ in own], [reward for _, reward in own], "o", color=color, markersize=3)
        ages = sorted({at for at, _ in own})
        axes.plot(ages, [mean(r for at, r in own if at == age) for age in ages], color=color, label=label)
    axes.set(xlabel="max_staleness", ylabel=f"reward, mean of the last {LAST} steps", ylim=(0, 1.05))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left")
