"""The miniature trainer's model: which episodes it learned from in which step, in durable files that form a chain."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from faults.gaps import Gaps


@dataclass(frozen=True)
class Trained:
    """One step of training."""

    step: int
    groups: list[list[str]]
    prints: dict[str, str]
    """episode id → print of the trajectory that was read."""


@dataclass(frozen=True)
class Checkpoint:
    """The state after `step` steps: that of the checkpoint at step `parent`, then `trained`."""

    step: int = 0
    parent: int = 0
    trained: tuple[Trained, ...] = ()


class Checkpoints:
    """``STEP.json`` in a folder; a file under another name was cut off by a crash."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def newest(self) -> Checkpoint:
        steps = [int(path.stem) for path in self._folder.glob("*.json")]
        return self._load(max(steps)) if steps else Checkpoint()

    def write(self, checkpoint: Checkpoint, gaps: Gaps) -> None:
        """Durable when it returns. `gaps` may end the process in the middle of the file."""
        text = json.dumps(asdict(checkpoint))
        unfinished = self._folder / f"{checkpoint.step:08d}.unfinished"
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text[: len(text) // 2])
            file.flush()
            gaps.at("in_checkpoint")
            file.write(text[len(text) // 2 :])
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(self._path(checkpoint.step))
        _sync_folder(self._folder)

    def lineage(self, since: int = 0) -> list[Trained]:
        """The steps from `since` on that the newest checkpoint's model has seen, in order."""
        steps: list[Trained] = []
        checkpoint = self.newest()
        while checkpoint.step > since:
            steps = [*checkpoint.trained, *steps]
            checkpoint = self._load(checkpoint.parent) if checkpoint.parent else Checkpoint()
        return [trained for trained in steps if trained.step >= since]

    def _load(self, step: int) -> Checkpoint:
        plain = json.loads(self._path(step).read_text(encoding="utf-8"))
        return Checkpoint(plain["step"], plain["parent"], tuple(Trained(**trained) for trained in plain["trained"]))

    def _path(self, step: int) -> Path:
        return self._folder / f"{step:08d}.json"


def groups_by_step(steps: Sequence[Trained]) -> dict[int, list[list[str]]]:
    return {trained.step: trained.groups for trained in steps}


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
