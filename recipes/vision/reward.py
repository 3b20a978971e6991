"""1 for the one word that is true of the picture, else 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    return float(solution_str.strip() == str(ground_truth))
