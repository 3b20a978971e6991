"""An exception in words."""

from __future__ import annotations

import os
import sysconfig
import traceback

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
    theirs = [frame for frame in frames if not frame.filename.startswith((*_NOT_THEIRS, "<frozen"))]
    where = f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""
    if not theirs and frames:
        where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})"
    return f"{type(error).__name__}: {error}{where}"
