"""How far the simulator is from what was measured: published runs and runs on this machine."""

from __future__ import annotations

from typing import Any

from penstock.simulator.local import local_case, predict_local
from penstock.simulator.published import HOST_RATE_CASE, Prediction, predict
from penstock.simulator.stated import cases

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


def _row(found: Prediction) -> dict[str, Any]:
    case = found.case
    return {
        "window_steps": case.window,
        "published": case.speedup,
        "predicted": found.speedup,
        "error": found.error,
        "error_any_window": found.largest_error,
        "step_s": found.asynchronous.step_s,
        "trainer_bubble": found.asynchronous.trainer_bubble,
        "calibrates": case.name == HOST_RATE_CASE,
    }
