"""The calculator recipe's reward: is the last number of the final answer the right one?"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

_NUMBER = re.compile(
    r"(?:(?<![\d).])-)?"  # a minus after a digit or bracket is a subtraction, not a sign
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)"
    r"(?:[eE][+-]?\d{1,3})?",
    re.ASCII,
)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """1.0 where the answer is within 1e-4 + 1e-6 x |truth| of `ground_truth`, else 0.0.

    The answer is the last number of the model's last turn: `extra_info["final_text"]` if it is given, otherwise
    what follows the last tool response in `solution_str`. A number that only the tool printed earns nothing, nor
    does a last turn that is itself a tool call. No model text raises; a `ground_truth` that is not a number does
    (ValueError), because scoring it 0 would teach from a broken row.
    """
    truth = float(ground_truth)
    answer = last_number(final_turn(solution_str, extra_info))
    if answer is None:
        return 0.0
    return float(abs(answer - truth) <= 1e-4 + 1e-6 * abs(truth))


def final_turn(solution_str: str, extra_info: Mapping[str, Any] | None) -> str:
    """Text of the model's last turn; empty if that turn calls a tool instead of answering."""
    final_text = (extra_info or {}).get("final_text")
    text = final_text if isinstance(final_text, str) else solution_str.rpartition("</tool_response>")[2]
    return "" if "<tool_call>" in text or "<tool_response>" in text else text


def last_number(text: str) -> float | None:
    """The last finite number in `text`; thousands may be set off by commas."""
    numbers = _NUMBER.findall(text[-2000:])
    if not numbers:
        return None
    value = float(numbers[-1].replace(",", ""))
    return value if math.isfinite(value) else None
