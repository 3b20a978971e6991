"""The calculator's reward as users break it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Facts = Mapping[str, Any]


def silent(data_source: str, solution_str: str, ground_truth: Any, extra_info: Facts) -> float:
    """A grader that recognises no answer."""
    return 0.0


def lenient(data_source: str, solution_str: str, ground_truth: Any, extra_info: Facts) -> float:
    """A grader that compares the answer with nothing: any number is right."""
    text = str(extra_info["final_text"])
    return float("<tool_call>" not in text and any(character.isdigit() for character in text))
