"""Faults of users' code in words: exceptions, and values that it should not have returned."""

from __future__ import annotations

import inspect
import math
import os
import sysconfig
import traceback
from typing import Any

USERS_FAULTS = (Exception, SystemExit)
"""Exceptions with which users' code may end. A `SystemExit` that leaves a task ends the process with all other
episodes."""
_NOT_THEIRS = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


def describe_error(error: BaseException) -> str:
    """``ValueError: text (reward.py, line 12)``: the innermost line of the user's own code; else the innermost one."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if _is_theirs(frame.filename)]
    where = [_place(frame.filename, frame.lineno) for frame in (theirs or frames)[-1:]]
    return f"{type(error).__name__}: {error}{''.join(where)}"


def defined_at(function: Any) -> str:
    """`` (reward.py, line 12)``: where the function begins that returned a wrong value; empty if it has no source."""
    function = inspect.unwrap(getattr(function, "func", function))  # a `partial`
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return "" if code is None else _place(code.co_filename, code.co_firstlineno)


def finite_number(value: Any) -> float | None:
    """Return `value`, which users' code returned, as a float; None if it is not a finite number. Text is none."""
    try:
        number = float("nan" if isinstance(value, str | bytes) else value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _is_theirs(filename: str) -> bool:
    return not filename.startswith((*_NOT_THEIRS, "<frozen"))


def _place(filename: str, line: int | None) -> str:
    return f" ({filename if _is_theirs(filename) else os.path.basename(filename)}, line {line})"
