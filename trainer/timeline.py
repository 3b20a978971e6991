"""``timeline.jsonl``: what the trainer did when, one line per interval. What ``penstock trace`` draws.

Lines are kept until `write` is called, between two steps: a killed trainer loses those of the step under way. Nothing
is ever cut back: a step that is trained again after a crash is there twice, as it happened.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

from penstock.common import append_jsonl, end_last_line

TIMELINE_FILE = "timeline.jsonl"


class Track(StrEnum):
    """Intervals of one track never overlap."""

    STEPS = "steps"
    PUBLISH = "publish"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"


class Timeline:
    """Calls may come from several threads. Without a folder (on other ranks) nothing is kept."""

    def __init__(self, run_dir: Path | None = None) -> None:
        self._path = run_dir / TIMELINE_FILE if run_dir is not None else None
        self._lines: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        if self._path is not None:
            end_last_line(self._path)

    @contextmanager
    def during(self, track: Track, name: str, number: int) -> Iterator[None]:
        """Note the block, also if it fails. `number`: of the step, or the version on other tracks."""
        at_unix_s, began = time.time(), time.monotonic()
        try:
            yield
        finally:
            took = round(time.monotonic() - began, 6)
            line = {"track": track, "name": name, "number": number, "at_unix_s": round(at_unix_s, 6), "s": took}
            if self._path is not None:
                with self._lock:
                    self._lines.append(line)

    def write(self) -> None:
        """Append what was noted since the last call."""
        with self._lock:
            lines, self._lines = self._lines, []
        if self._path is not None and lines:
            append_jsonl(self._path, lines)
