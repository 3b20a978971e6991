"""Reading the line files of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines; a last line that a killed process left half-written is passed over."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def last_by_step(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per step, in order: a step that was replayed after a crash is written again, the last one counts."""
    newest = {int(row["step"]): row for row in rows}
    return [newest[step] for step in sorted(newest)]
