"""Append-only files of JSON lines that outlive the process that writes them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Records:
    """One file; several processes may append. With `durable`, a line is on disk when `write` returns."""

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._durable = durable
        # Lines appended by one write each do not mix, whoever else appends.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, kind: str, **fields: Any) -> None:
        os.write(self._descriptor, (json.dumps({"kind": kind, **fields}) + "\n").encode())
        if self._durable:
            os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Every whole line; none where there is no file. A line that a kill cut off was never written."""
    if not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def read_folder(folder: Path) -> list[dict[str, Any]]:
    """All records of all files of a folder, file by file."""
    return [record for path in sorted(folder.glob("*.jsonl")) for record in read_records(path)]
