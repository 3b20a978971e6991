"""Rewards of several runs against steps, tokens and seconds, as one picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.support.learning_run import NONE, Curve, Curves, smoothed

AXES: dict[str, Callable[[Curve], Sequence[float]]] = {
    "step": lambda curve: range(1, len(curve.reward) + 1),
    "sampled tokens": lambda curve: list(accumulate(curve.tokens)),
    "seconds": lambda curve: curve.wall_s,
}


def curves_by_label(curves: Curves) -> dict[str, list[Curve]]:
    """Return the curves of all seeds by staleness and correction: ``4``, ``4, not corrected``."""
    cells: dict[str, list[Curve]] = {}
    for run in sorted(curves, key=lambda run: (run.staleness, run.correction == NONE, run.seed)):
        label = f"{run.staleness}, not corrected" if run.correction == NONE else str(run.staleness)
        cells.setdefault(label, []).append(curves[run])
    return cells


def draw_curves(cells: Mapping[str, Sequence[Curve]], title: str, path: Path) -> None:
    """Write a picture with a line per cell: the mean over its seeds, and their range.

    The seeds of a cell have equally many steps. Rewards are trailing means over three steps. `title` is the legend's.
    """
    figure = Figure(figsize=(12, 4))
    FigureCanvasAgg(figure)
    plots = figure.subplots(1, len(AXES), sharey=True)
    for plot, (label, axis) in zip(plots, AXES.items(), strict=True):
        for number, (name, seeds) in enumerate(cells.items()):
            rewards = np.array([smoothed(curve.reward) for curve in seeds])
            x = np.mean([list(axis(curve)) for curve in seeds], axis=0)
            plot.plot(x, rewards.mean(axis=0), color=f"C{number}", label=name)
            plot.fill_between(x, rewards.min(axis=0), rewards.max(axis=0), color=f"C{number}", alpha=0.12)
        plot.set(xlabel=label, ylim=(0, 1.02))
    plots[0].set(ylabel="mean reward")
    plots[0].legend(title=title, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
