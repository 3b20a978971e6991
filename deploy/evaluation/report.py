"""eval.json, summary.json and the table: figures of the episodes, by data source and of all.

    avg@n    mean reward of the samples, a mean over tasks of each task's mean
    pass@k   chance that one of k samples is right (`statistics`)

Episodes that the infrastructure failed are counted and left out, never scored 0. A task with fewer than k samples left
counts for no pass@k of that k.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from penstock.common import write_atomically
from penstock.deploy.evaluation.episodes import EpisodeResult
from penstock.deploy.evaluation.statistics import CONFIDENCE, RESAMPLES, estimate, pass_at_k
from penstock.deploy.evaluation.target import EvalPlan

ALL = "all"
Figures = dict[str, Any]


def ks_of(samples: int) -> list[int]:
    """1, 2, 4 … and n."""
    powers = [1 << power for power in range(samples.bit_length()) if 1 << power <= samples]
    return sorted({*powers, samples})


def figures_of(
    results: Sequence[EpisodeResult], samples: int, tasks_by_source: Mapping[str, int]
) -> dict[str, Figures]:
    """Return figures by data source, and of `ALL` if there are several. `tasks_by_source`: data source → tasks."""
    figures = {
        source: _figures([r for r in results if r.data_source == source], samples, tasks_by_source[source])
        for source in tasks_by_source
    }
    if len(tasks_by_source) > 1:
        figures[ALL] = _figures(results, samples, sum(tasks_by_source.values()))
    return figures


def _figures(results: Sequence[EpisodeResult], samples: int, tasks: int) -> Figures:
    by_task: dict[int, list[EpisodeResult]] = {}
    for one in results:
        by_task.setdefault(one.row, []).append(one)
    figures: Figures = {
        "tasks": tasks,
        "episodes": len(results),
        "missing": tasks * samples - len(results),
        "truncated": fmean(one.truncated for one in results) if results else None,
        "num_turns": fmean(one.num_turns for one in results) if results else None,
        "response_tokens": fmean(one.response_tokens for one in results) if results else None,
    }
    if not by_task:
        return figures
    alike = list(by_task.values())
    figures[f"avg@{samples}"] = asdict(estimate([fmean(one.reward for one in task) for task in alike]))
    for k in ks_of(samples):
        values = [pass_at_k(len(task), sum(one.right for one in task), k) for task in alike if len(task) >= k]
        if values:
            figures[f"pass@{k}"] = asdict(estimate(values))
    return figures


def write_report(plan: EvalPlan, results: Sequence[EpisodeResult]) -> Figures:
    """Writes eval.json and summary.json, and returns what the first one holds."""
    tasks_by_source: dict[str, int] = {}
    for row in plan.rows:
        tasks_by_source[row.data_source] = tasks_by_source.get(row.data_source, 0) + 1
    sources = figures_of(results, plan.samples, tasks_by_source)
    report: Figures = {
        "name": plan.config.name,
        "model": plan.source,
        "samples": plan.samples,
        "temperature": plan.temperature,
        "confidence": CONFIDENCE,
        "interval": f"bootstrap over tasks, {RESAMPLES} resamples; Wilson where all tasks are 0 or all 1",
        "sources": sources,
    }
    folder = plan.run.root
    _write(folder / "eval.json", report)
    whole = sources[ALL] if ALL in sources else next(iter(sources.values()))
    flat = {name: value["value"] if isinstance(value, dict) else value for name, value in whole.items()}
    _write(folder / "summary.json", {"name": plan.config.name, "model": plan.source, **flat})
    return report


def _write(path: Path, value: Figures) -> None:
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def table_of(report: Figures) -> Table:
    """Return a table for a terminal, with a column per data source, without its heading."""
    sources: Mapping[str, Figures] = report["sources"]
    names = list(dict.fromkeys(name for one in sources.values() for name in one))
    table = Table()
    for name in ("", *sources):
        table.add_column(name)
    for name in names:
        table.add_row(name, *(_cell(figures.get(name)) for figures in sources.values()))
    return table


def _cell(value: Figures | float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return f"{value['value']:.3f}  [{value['low']:.3f}, {value['high']:.3f}]"
    return str(value) if isinstance(value, int) else f"{value:.2f}"
