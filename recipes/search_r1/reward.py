"""Search-R1's reward: is what stands between ``<answer>`` and ``</answer>`` in the model's last turn a reference?

Jin et al. 2025, "Search-R1" (arXiv:2503.09516), section 3.4: exact match after normalisation; no reward for form or for
searching. F1 of words (Rajpurkar et al. 2016, "SQuAD", arXiv:1606.05250) is a metric, or with ``metric: f1`` the
reward.

Only the last turn counts: a passage that spells the tags out is not an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from penstock.agent_loops.rewards import exact_match, f1


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    metric: Literal["em", "f1"] = "em",
) -> dict[str, float]:
    """`score` is the metric that was chosen. Raises `ValueError` for another metric, or a row without a reference."""
    if metric not in ("em", "f1"):
        raise ValueError(f"metric is em or f1, not {metric!r}")
    info = extra_info or {}
    turn = str(info.get("final_text", solution_str))
    scores = {
        "em": exact_match(data_source, turn, ground_truth, info),
        "f1": f1(data_source, turn, ground_truth, info),
    }
    return {
        "score": scores[metric],
        **scores,
        "answered": float("</answer>" in turn or info.get("final_answer") is not None),
    }
