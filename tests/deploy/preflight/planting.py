"""How faults are planted: each is an async context that leaves things wrong while it is open, and takes no shortcut."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.deploy.preflight.suite import FACTS, TRIALS, Asked

REPOSITORY = Path(__file__).parents[3]
RECIPE = REPOSITORY / "recipes" / "calculator.yaml"
MODEL = REPOSITORY / "recipes" / "calculator" / "model"
GOOD_ROW = {
    "prompt": [{"role": "user", "content": "1+1?"}],
    "data_source": "calculator",
    "reward_model": {"style": "rule", "ground_truth": "2"},
}


@dataclass(frozen=True)
class Place:
    """What a plant may use."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def model(self) -> Path:
        """A sound copy of the calculator's."""
        return Path(shutil.copytree(MODEL, self.folder / "model"))

    def rows(self, *rows: dict[str, Any]) -> str:
        """The override that has a dataset of these rows."""
        file = self.folder / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return f"data.train={file}"

    def file(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path


Plant = Callable[[Place], AbstractAsyncContextManager[Sequence[str]]]


@dataclass(frozen=True)
class Fault:
    title: str
    asked: Asked
    """The doctor's check that must find it."""
    check: str
    """Name that it is told under."""
    fix: str
    """Regular expression that its fix matches."""
    plant: Plant


FAULTS: list[Fault] = []


def planted(asked: Asked, check: str, fix: str) -> Callable[[Callable[[Place], Any]], Callable[[Place], Any]]:
    """Decorator: the function gives the overrides with which the fault is there, or yields them while it is."""
    assert asked in (*FACTS, *TRIALS), "the doctor itself must ask it"

    def add(plant: Callable[[Place], Any]) -> Callable[[Place], Any]:
        FAULTS.append(Fault(plant.__name__, asked, check, fix, _opened(plant)))
        return plant

    return add


def _opened(plant: Callable[[Place], Any]) -> Plant:
    @contextlib.asynccontextmanager
    async def opened(place: Place) -> AsyncIterator[Sequence[str]]:
        made = plant(place)
        if isinstance(made, Sequence):
            yield made
        elif hasattr(made, "__aenter__"):
            async with made as overrides:
                yield overrides
        else:
            with made as overrides:
                yield overrides

    return opened


@contextlib.contextmanager
def small_disk(folder: Path, size_mb: int) -> Iterator[Path]:
    """A file system of its own of this size; skips where this user may mount none."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "none", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"a small disk is a tmpfs, and mounting one needs root: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield int(other.getsockname()[1])


def unused_port() -> int:
    with taken_port() as port:
        return port


def write_huge_model(folder: Path, parameters: int) -> Path:
    """A model of so many parameters that takes no room: its file is a hole with a true header."""
    shutil.copytree(MODEL, folder)
    width = 4096
    shape = [parameters // width, width]
    size = 4 * shape[0] * width
    header = json.dumps(
        {"model.layers.0.mlp.up_proj.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}
    )
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + size)
    return folder
