"""The lines of ``metrics.jsonl`` as columns, thinned so that a curve has as many points as a screen can show."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.dashboard.plain import plain
from penstock.trainer import LineTail

Row = dict[str, Any]
HISTOGRAM = "staleness_tokens"
BUBBLE = "bubble"
LONGEST_LINE = 1 << 16
"""Bytes."""
LOOK_BACK = 200
"""Rows in which the names of columns are looked for."""


class MetricsFile:
    """Reads on from where it was; safe to ask from several threads."""

    def __init__(self, path: Path) -> None:
        self._tail = LineTail(path)
        self._rows: dict[int, Row] = {}
        self._lock = threading.Lock()

    def rows(self) -> list[Row]:
        """One per step, in order. A line for a step ends what was known of later ones: they are trained again."""
        with self._lock:
            new = self._tail.read()
            if new:
                first = int(new[0]["step"])
                self._rows = {step: row for step, row in self._rows.items() if step < first}
            self._rows |= {int(row["step"]): _with_bubble(row) for row in new}
            return [self._rows[step] for step in sorted(self._rows)]


def _with_bubble(row: Row) -> Row:
    """bubble = wait_s / wall_s, the share of the step in which the trainer had nothing to train on."""
    wall_s, wait_s = row.get("wall_s"), row.get("wait_s")
    return row if not wall_s or wait_s is None else {**row, BUBBLE: wait_s / wall_s}


def newest_row(path: Path) -> Row | None:
    """The last whole line, without reading those before; None where there is none."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LONGEST_LINE))
        lines = file.read().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    row: Row | None = json.loads(whole[-1]) if whole else None
    return row


def column_names(rows: Sequence[Row]) -> list[str]:
    """Every name that holds numbers, sorted; without the step itself."""
    found = {name for row in [*rows[:1], *rows[-LOOK_BACK:]] for name, value in row.items() if _is_number(value)}
    return sorted(found - {"step"})


def columns(rows: Sequence[Row], names: Sequence[str], points: int) -> dict[str, Any]:
    """``steps`` and ``series``: at most `points` buckets of neighbouring steps, each its last step and its mean."""
    buckets = _buckets(rows, points)
    series = {name: [_mean([row.get(name) for row in bucket]) for bucket in buckets] for name in names}
    return {"steps": [bucket[-1]["step"] for bucket in buckets], "series": series}


def staleness(rows: Sequence[Row], points: int) -> dict[str, Any]:
    """``steps``, ``ages`` and ``shares`` [bucket][age]: the share of trained tokens that were so many versions old."""
    buckets = _buckets([row for row in rows if row.get(HISTOGRAM)], points)
    totals = [sum((Counter({int(age): n for age, n in row[HISTOGRAM].items()}) for row in bucket), Counter())
              for bucket in buckets]  # fmt: skip
    ages = list(range(max((age for total in totals for age in total), default=-1) + 1))
    shares = [[total[age] / total.total() for age in ages] for total in totals]
    return {"steps": [bucket[-1]["step"] for bucket in buckets], "ages": ages, "shares": shares}


def _buckets(rows: Sequence[Row], points: int) -> list[Sequence[Row]]:
    size = max(1, -(-len(rows) // points))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _mean(values: Sequence[Any]) -> float | None:
    numbers = [value for value in values if _is_number(value)]
    mean: float | None = plain(sum(numbers) / len(numbers)) if numbers else None
    return mean


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
