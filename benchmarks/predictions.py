"""Predicts runs that were measured with `penstock simulate`'s model, and compares.

    penstock bench predictions --json

Rates are solved for on the synchronous row of a published table, or on one run of this project; the asynchronous row,
or another run, is predicted from its settings. docs/how/scale.md has the rules. Nothing is started.
"""

from __future__ import annotations

from typing import Any

from benchmarks.simulator.page import WITHIN_LOCAL, WITHIN_PUBLISHED, check


def measure() -> dict[str, Any]:
    """`figures` has the largest errors and each run's; `ratio` the predicted speed-up over the published one."""
    report = check()
    return {
        "bench": "predictions",
        "ratio": {name: row["predicted"] / row["published"] for name, row in report["published"].items()},
        "figures": {
            "ok": report["ok"],
            **report["figures"],
            "published": report["published"],
            "local": report["local"],
        },
        "setup": {"within_published": WITHIN_PUBLISHED, "within_local": WITHIN_LOCAL},
    }
