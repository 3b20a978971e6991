"""The line files of a run: one JSON object per line, written by the trainer, read by whoever watches."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; one that a crash cut short, or that is being written, ends it. Empty without a file."""
    lines: list[dict[str, Any]] = []
    if not path.exists():
        return lines
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            logger.warning("%s: line %d is cut short and left out", path, len(lines) + 1)
            break
    return lines


class LineTail:
    """Reads a growing file line by line, each line once; all of them again where the file was replaced or cut."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Complete lines since the last call; a line that is still being written comes with a later one."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._offset:
                self._inode, self._offset = found.st_ino, 0
            file.seek(self._offset)
            complete, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(complete) + len(newline)
        return [json.loads(line) for line in complete.splitlines()]


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    append_lines(path, [line])


def append_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """At the end of the file, in one write."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def rewrite_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file at once; nothing is made where there was none and there are no lines."""
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    if not text and not path.exists():
        return
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def last_by_step(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per step, in order: a step that was replayed after a crash may be there again, the last one counts."""
    newest = {int(row["step"]): row for row in rows}
    return [newest[step] for step in sorted(newest)]
