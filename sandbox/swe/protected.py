"""Which paths of a repository steer its tests."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable


def is_protected(path: str, guarded: Iterable[str], patterns: Iterable[str]) -> bool:
    """A hidden test, a file or link in its way, or what a pattern names (`task.PROTECTED`)."""
    if any(path == one or path.startswith(f"{one}/") or one.startswith(f"{path}/") for one in guarded):
        return True
    parts = path.split("/")
    return any(
        fnmatch.fnmatchcase(parts[0], pattern[1:])
        if pattern.startswith("/")
        else any(fnmatch.fnmatchcase(part, pattern) for part in parts)
        for pattern in patterns
    )
