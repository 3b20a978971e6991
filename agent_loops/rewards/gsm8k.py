"""GSM8K: the number behind ``####``, or the last number of the answer; verl's strict and flexible.

Numbers are compared as decimals: ``1,000``, ``1000.`` and ``1000.0`` are equal, rounding never happens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

TAIL_CHARS = 300
"""Only the end is read, as in verl: an answer buried in what follows it is none."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    method: Literal["strict", "flexible"] = "strict",
    right: float = 1.0,
    wrong: float = 0.0,
) -> float:
    """`right` or `wrong`. Raises `ValueError` where the ground truth has no number or `method` is unknown."""
    if method not in ("strict", "flexible"):
        raise ValueError(f"method is {method!r}: strict or flexible")
    expected = truth_of(ground_truth)
    number = last_marked(solution_str) if method == "strict" else last_number(solution_str)
    return right if number == expected else wrong


def truth_of(ground_truth: Any) -> Decimal:
    """A row's number, whether the whole reference answer is given or the number alone. Raises `ValueError`."""
    text = str(ground_truth)
    value = last_marked(text) if "####" in text else to_decimal(text.strip().lstrip("$"))
    if value is None:
        raise ValueError(f"the ground truth {text[-80:]!r} is not a number")
    return value


def last_marked(text: str) -> Decimal | None:
    """Returns the number after the last ``####``; None if there is none."""
    numbers = re.findall(r"####\s*\$?\s*(-?[0-9.,]+)", text[-TAIL_CHARS:])
    return to_decimal(numbers[-1]) if numbers else None


def last_number(text: str) -> Decimal | None:
    words = re.findall(r"-?[0-9.,]*[0-9][0-9.,]*", text[-TAIL_CHARS:])
    numbers = (to_decimal(word) for word in reversed(words))
    return next((number for number in numbers if number is not None), None)


def to_decimal(text: str) -> Decimal | None:
    """Thousands separators and a full stop that ends the sentence are no part of the number."""
    try:
        return Decimal(text.replace(",", "").rstrip("."))
    except InvalidOperation:
        return None
