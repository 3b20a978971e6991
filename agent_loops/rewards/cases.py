"""Test cases of programs, in the shapes of verl and PRIME.

    {"inputs": [...], "outputs": [...]}                        the program reads stdin and prints
    {"inputs": [...], "outputs": [...], "fn_name": "solve"}    a function, or a method of ``Solution``, is called
    {"assert_case": ["assert add(1, 2) == 3", ...]}            statements that must not raise; also a plain list of them

Eurus' and PRIME's datasets hold it as JSON text. An input of a call is one JSON value per line, or a list.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


class BadCases(ValueError):
    """The row's ground truth holds no test cases; the message says what is there."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test. What is expected never enters the box, except where it is part of an assertion."""

    kind: Literal["stdin", "call", "assert"]
    given: Any
    """stdin: text; call: {"name", "arguments"}; assert: the statement."""
    expected: Any = None

    def passes(self, output: Any) -> bool:
        """`output`: what was printed, what the call returned, True where the assertion held."""
        if self.kind == "stdin":
            return same_text(str(output), str(self.expected))
        return output is True if self.kind == "assert" else same_value(output, self.expected)


def read_cases(ground_truth: Any) -> list[Case]:
    """Raises `BadCases`."""
    given = _plain(ground_truth)
    if isinstance(given, list):
        given = {"assert_case": given}
    if not isinstance(given, Mapping):
        raise BadCases(f"test cases must be a mapping or a list of assertions, found {str(given)[:100]!r}")
    cases = [Case("assert", text) for text in given.get("assert_case") or ()]
    inputs, outputs = given.get("inputs") or [], given.get("outputs") or []
    # verl gives assertions with as many empty inputs and outputs.
    cases = cases or _pairs(inputs, outputs, given.get("fn_name"))
    if not cases:
        raise BadCases(f"no test cases: inputs, outputs and assert_case are empty (keys: {', '.join(map(str, given))})")
    return cases


def _plain(ground_truth: Any) -> Any:
    if not isinstance(ground_truth, str):
        return ground_truth
    try:
        return json.loads(ground_truth)
    except ValueError as error:
        raise BadCases(f"test cases are no JSON: {ground_truth[:100]!r}: {error}") from error


def _pairs(inputs: Any, outputs: Any, name: str | None) -> list[Case]:
    if len(inputs) != len(outputs):
        raise BadCases(f"{len(inputs)} inputs and {len(outputs)} outputs")
    if name:
        return [
            Case("call", {"name": name, "arguments": _arguments(given)}, _value(expected))
            for given, expected in zip(inputs, outputs, strict=True)
        ]
    return [Case("stdin", _text(given), _text(expected)) for given, expected in zip(inputs, outputs, strict=True)]


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(given: Any) -> list[Any]:
    if not isinstance(given, str):
        return list(given)
    try:
        return [json.loads(line) for line in given.split("\n") if line.strip()]
    except ValueError as error:
        raise BadCases(f"an input of a call is one JSON value per line, found {given[:100]!r}") from error


def _value(expected: Any) -> Any:
    try:
        return json.loads(expected) if isinstance(expected, str) else expected
    except ValueError:
        return expected


def same_value(given: Any, expected: Any) -> bool:
    """Equal as JSON, or the only element of `expected`: datasets wrap results in a list now and then."""
    if given == expected or (
        isinstance(given, float) and isinstance(expected, int | float) and _close(given, expected)
    ):
        return True
    return isinstance(expected, list) and len(expected) == 1 and given == expected[0]


def same_text(given: str, expected: str) -> bool:
    """Equal line by line; spaces at line ends and empty last lines do not count, decimals may differ by rounding."""
    ours, theirs = ([line.split() for line in text.rstrip().splitlines()] for text in (given, expected))
    return len(ours) == len(theirs) and all(
        len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(ours, theirs, strict=True)
    )


def _same_word(given: str, expected: str) -> bool:
    if given == expected:
        return True
    if "." not in given + expected:
        return False
    try:
        return _close(float(given), float(expected))
    except ValueError:
        return False


def _close(given: float, expected: float) -> bool:
    """numpy's `allclose`, with which PRIME compares."""
    return math.isclose(given, expected, rel_tol=1e-5, abs_tol=1e-8)
