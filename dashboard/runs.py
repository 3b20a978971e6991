"""The runs in a folder: what each has written so far."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from penstock.common import read_jsonl
from penstock.dashboard.jsonable import plain
from penstock.dashboard.metrics import Devices, MetricsFile, newest_row
from penstock.dashboard.trajectories import TrajectoryIndex

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
IMAGE = re.compile(r"[0-9a-f]{64}")
"""Names of images; no name leads out of the folder."""
DEFAULT_PARSER = "hermes"


class NoSuchRun(LookupError):
    """Neither a folder nor a living run has this name."""


class RunFiles:
    """One run's folder, which may not be there (yet)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.metrics = MetricsFile(root / "metrics.jsonl")
        self._index: TrajectoryIndex | None = None
        self._lock = threading.Lock()

    @property
    def index(self) -> TrajectoryIndex:
        with self._lock:
            if self._index is None:
                self._index = TrajectoryIndex(self.root / "trajectories", self.root / "trajectories.sqlite")
            return self._index

    def image(self, name: str) -> bytes | None:
        """Return an image of a recorded trajectory by the sha256 of its bytes; None if there is none of that name."""
        path = self.root / "images" / name
        return path.read_bytes() if IMAGE.fullmatch(name) and path.is_file() else None

    def dead_letters(self) -> list[dict[str, Any]] | None:
        """The first dead letters of a run that ended, as `whole_letter` makes them; None if it wrote none."""
        file = self.root / "dead_letters.jsonl"
        return read_jsonl(file) if file.exists() else None

    def config(self) -> dict[str, Any]:
        """The resolved recipe; empty if it is not there."""
        try:
            tree = yaml.safe_load((self.root / "config.yaml").read_text(encoding="utf-8"))
        except (FileNotFoundError, yaml.YAMLError):
            return {}
        return tree if isinstance(tree, dict) else {}

    @property
    def devices(self) -> Devices:
        config = flat(self.config())
        engine = config.get("rollout.engine")
        ranks = (config.get(f"rollout.{engine}_args.{name}") for name in ("tensor_parallel_size", "tp_size"))
        per_server = int(next(filter(None, ranks), 1))
        servers = int(config.get("rollout.servers") or 1)
        return Devices(max(1, servers) * per_server, int(config.get("trainer.ranks") or 1))

    @property
    def quiet_s(self) -> float:
        """Since the last step was written."""
        file = self.root / "metrics.jsonl"
        return max(0.0, time.time() - file.stat().st_mtime) if file.exists() else 0.0

    def end(self) -> dict[str, Any]:
        """Return ``ended`` (the reason in words; None if unknown), ``failed`` and the run's ``summary``."""
        end = self.json_of("ended.json")
        return {"ended": end.get("why"), "failed": end.get("failed") is True, "summary": self.json_of("summary.json")}

    def json_of(self, name: str) -> dict[str, Any]:
        """The object in a file of the run; empty if there is none, or if it is being written."""
        try:
            tree = json.loads((self.root / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return tree if isinstance(tree, dict) else {}

    def overview(self) -> dict[str, Any]:
        """A line of the list of runs."""
        file = self.root / "metrics.jsonl"
        row = newest_row(file) or {}
        return {
            "steps": int(row.get("step", -1)) + 1,
            "steps_planned": flat(self.config()).get("trainer.steps"),
            "reward": plain(row.get("reward")) if row else self._evaluated(),
            "written_unix_s": file.stat().st_mtime if file.exists() else None,
            "finished": (self.root / "summary.json").exists(),
        }

    def _evaluated(self) -> float | None:
        """The mean reward of an evaluation; None if the folder has none."""
        return next((value for name, value in self.json_of("summary.json").items() if name.startswith("avg@")), None)

    def close(self) -> None:
        with self._lock:
            if self._index is not None:
                self._index.close()
                self._index = None


class RunFolders:
    """The folders below `root`, and runs that live elsewhere, by name."""

    def __init__(self, root: Path, living: Callable[[], Sequence[str]]) -> None:
        self._root = root
        self._living = living
        self._open: dict[str, RunFiles] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Return the names of running runs, then of the others, newest first."""
        modified = {path.parent.name: path.stat().st_mtime for path in self._root.glob("*/config.yaml")}
        living = self._living()
        names = {name for name in {*modified, *living} if NAME.fullmatch(name)}
        return sorted(names, key=lambda name: (name not in living, -modified.get(name, 0.0), name))

    def run(self, name: str) -> RunFiles:
        """Raises `NoSuchRun`."""
        root = self._root / name
        if not NAME.fullmatch(name) or not (root.is_dir() or name in self._living()):
            raise NoSuchRun(f"no run called {name[:80]!r} in {self._root}")
        with self._lock:
            return self._open.setdefault(name, RunFiles(root))

    def close(self) -> None:
        for run in self._open.values():
            run.close()


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return leaves
