"""How long rollouts were held back, from the living queue or from what a run that ended wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.dashboard.runs import RunFiles, flat

WAIT = "agent:admission"
"""Seconds of whole workers: a worker with half of its slots held back for a second waits half a second."""


def rollout_idle(files: RunFiles, rows: Sequence[Mapping[str, Any]], status: Mapping[str, Any] | None) -> float | None:
    """Share of the agent workers' time for which admission refused episodes; None where nobody counted."""
    if status is None:
        status, elapsed_s = _summary(files)
    else:  # waits are counted up to now, rows up to the last step
        elapsed_s = sum(row.get("wall_s", 0.0) for row in rows) + files.quiet_s
    waited_s = status.get("waits_s", {}).get(WAIT)
    workers = max(len(status.get("workers", {})), int(flat(files.config()).get("agent.workers") or 1))
    return min(1.0, waited_s / (workers * elapsed_s)) if waited_s is not None and elapsed_s else None


def _summary(files: RunFiles) -> tuple[Mapping[str, Any], float]:
    try:
        summary = json.loads((files.root / "summary.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}, 0.0
    return {"waits_s": summary.get("wait_s", {})}, float(summary.get("wall_s", 0.0))
