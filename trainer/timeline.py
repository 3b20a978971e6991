"""``timeline.jsonl``: what the trainer did when, one line per interval. What ``penstock trace`` draws.

Lines are kept until `write` is called, between two steps: a killed trainer loses those of the step under way. Nothing
is ever cut back: a step that is trained again after a crash is there twice, as it happened.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from penstock.trainer.jsonl import append_lines

STEPS, PUBLISH, CHECKPOINT, EVALUATION = "steps", "publish", "checkpoint", "evaluation"
"""Tracks: what of one track never overlaps."""
FILE = "timeline.jsonl"


class Timeline:
    """Calls may come from several threads. Without a folder (on other ranks) nothing is kept."""

    def __init__(self, run_dir: Path | None = None) -> None:
        self._path = run_dir / FILE if run_dir is not None else None
        self._lines: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        if self._path is not None and self._path.exists() and not self._path.read_bytes().endswith(b"\n"):
            # What a killed trainer was writing: the next line must not become a part of it.
            with self._path.open("a") as file:
                file.write("\n")

    @contextmanager
    def during(self, track: str, name: str, number: int) -> Iterator[None]:
        """Note the block, also where it fails. `number`: of the step, or the version on other tracks."""
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
            append_lines(self._path, lines)


def read_timeline(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's file; those that a killed trainer left half written are passed over."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            lines.append(json.loads(text))
    return lines
