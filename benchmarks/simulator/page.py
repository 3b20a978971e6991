"""The tables of docs/how/scale.md, and the check of predictions against measured runs.

`python -m benchmarks.simulator.page docs/how/scale.md` rewrites the tables.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.simulator.local import local_case, predict_local
from benchmarks.simulator.published import HOST_RATE_CASE, Prediction, predict
from benchmarks.simulator.scale import head, rendered
from benchmarks.simulator.stated import cases

WITHIN_PUBLISHED = 0.25
WITHIN_LOCAL = 0.15


def check() -> dict[str, Any]:
    """``{"ok", "figures", "published", "local"}``; figures hold the two largest errors, relative.

    Listed and not counted: the case that a constant is derived from, and local runs whose company changed.
    """
    published = {name: _row(predict(case)) for name, case in cases().items()}
    counted = [row for name, row in published.items() if name != HOST_RATE_CASE]
    runs = predict_local(local_case())
    local = {run.name: {**run.model_dump(exclude={"name"}), "counted": run.counted} for run in runs}
    figures = {
        "largest_error_published": max(row["error"] for row in counted),
        "largest_error_published_any_window": max(row["error_any_window"] for row in counted),
        "mean_error_published": sum(row["error"] for row in counted) / len(counted),
        "largest_error_local": max(run.error for run in runs if run.counted),
        "largest_error_local_any_load": max(run.error for run in runs),
    }
    within = figures["largest_error_published"] <= WITHIN_PUBLISHED and figures["largest_error_local"] <= WITHIN_LOCAL
    return {"ok": within, "figures": figures, "published": published, "local": local}


def _row(prediction: Prediction) -> dict[str, Any]:
    case = prediction.case
    return {
        "window_steps": case.window,
        "published": case.speedup,
        "predicted": prediction.speedup,
        "error": prediction.error,
        "error_any_window": prediction.largest_error,
        "step_s": prediction.asynchronous.step_s,
        "trainer_bubble": prediction.asynchronous.trainer_bubble,
        "calibrates": case.name == HOST_RATE_CASE,
    }


PLACE = re.compile(r"<!-- table: (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)


def tables_in(page: str) -> dict[str, str]:
    """Returns the text between the marks, by name."""
    return {name: text.strip("\n") for name, text in PLACE.findall(page)}


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """Tables that are not in `tables` stay. A mark without a table is a mistake of the page: `KeyError`."""
    all_tables = {**tables_in(page), **tables}
    return PLACE.sub(lambda found: f"<!-- table: {found[1]} -->\n{all_tables[found[1]]}\n<!-- end -->", page)


def published_table(checked: Mapping[str, Any]) -> Iterator[str]:
    yield from head(
        "case",
        "rollout : trainer",
        "staleness",
        "speed-up published, by steps",
        "compared",
        "predicted",
        "error",
        "furthest window",
    )
    for name, case in cases().items():
        row, mode = checked["published"][name], case.stated.asynchronous
        stated = ", ".join(f"{steps}: {speedup:.2f}" for steps, speedup in case.published.items())
        error = "calibrates" if row["calibrates"] else f"{row['error']:.1%}"
        yield (
            f"| `{name}` | {mode.rollout_gpus} : {mode.trainer_gpus} | {mode.staleness:g} | {stated} "
            f"| {row['published']:.2f} | {row['predicted']:.2f} | {error} | {row['error_any_window']:.0%} |"
        )


def local_table(checked: Mapping[str, Any]) -> Iterator[str]:
    yield from head("run", "load: calibration, run", "measured step", "predicted", "error", "counted")
    for name, row in checked["local"].items():
        first, second = row["loads"]
        yield (
            f"| `{name}` | {first:.1f}, {second:.1f} | {row['measured_s']:.2f} s | {row['predicted_s']:.2f} s "
            f"| {row['error']:.1%} | {'yes' if row['counted'] else 'no: loads differ'} |"
        )


def checked_tables(checked: Mapping[str, Any]) -> dict[str, str]:
    return {"published": "\n".join(published_table(checked)), "local": "\n".join(local_table(checked))}


if __name__ == "__main__":
    tables = {**rendered(), **checked_tables(check())}
    for path in map(Path, sys.argv[1:]):
        path.write_text(with_tables(path.read_text(), tables))
