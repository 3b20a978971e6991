"""``roles.json``: the processes of a living run, for whoever looks at it from another process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.deploy.watchdog import Watched
from penstock.trainer import rewrite_lines


class RolesFile:
    """Written when something changed, replaced at once: a reader never sees half of it."""

    def __init__(self, path: Path, processes: Sequence[Watched]) -> None:
        self._path = path
        self._processes = processes
        self._written: dict[str, Any] = {}

    def write(self) -> None:
        now = {p.spec.name: {"state": p.state, "restarts": p.restarts} for p in self._processes}
        if now != self._written:
            rewrite_lines(self._path, [now])
            self._written = now

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def read_roles(path: Path) -> dict[str, dict[str, Any]]:
    """Role → ``state`` and ``restarts``; empty where the run has no such file."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        found: dict[str, dict[str, Any]] = json.loads(path.read_text())
        return found
    return {}
