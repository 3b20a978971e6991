"""A version is written whole or not at all, in little memory, whatever happens to the trainer or to its disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from safetensors import safe_open

from penstock.weight_sync import NoSpace, WeightPublisher, checksum, read_verified

pytestmark = pytest.mark.torch

WRITE_FOR_EVER = """
import sys, torch
from pathlib import Path
from penstock.weight_sync import WeightPublisher
publisher = WeightPublisher(Path(sys.argv[1]), "shm", keep=2)
print("ready", flush=True)
for version in range(1, 10**6):
    publisher.write(version, {f"t{n}": torch.full((1 << 20,), float(version)) for n in range(8)}.items())
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 56 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=56m,mode=700", "none", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("full_every", [1, 4])
def test_a_disk_that_fills_up_in_mid_write_costs_that_version_only(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, full_every: int
) -> None:
    publisher = WeightPublisher(small_disk, "shm", keep=1, full_every=full_every)
    tensors = {"w": torch.rand(2 << 20), "v": torch.rand(2 << 20)}
    announced = publisher.write(1, tensors.items())
    others = small_disk / "of-others"
    others.write_bytes(b"x" * (34 << 20))
    usage = namedtuple("usage", "total used free")(1 << 30, 0, 1 << 30)  # what there was a moment ago
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _path: usage)
        after = {name: torch.rand_like(tensor) for name, tensor in tensors.items()}
        with pytest.raises(NoSpace, match=r"free some, or take another place with rollout\.weight_transport"):
            publisher.write(2, after.items())
    assert sorted(path.name for path in small_disk.iterdir()) == ["of-others", "weights-00000001.safetensors"]
    assert torch.equal(read_verified(announced)["w"], tensors["w"])
    others.unlink()
    assert torch.equal(read_verified(publisher.write(2, after.items()))["v"], after["v"])


@pytest.mark.slow
async def test_a_trainer_killed_while_it_writes_leaves_whole_versions_only(tmp_path: Path) -> None:
    for _ in range(2):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WRITE_FOR_EVER, str(tmp_path), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        await asyncio.to_thread(_stop_while_writing, tmp_path, process.pid)
        process.kill()
        await process.wait()
        for path in tmp_path.glob("weights-*.safetensors"):
            _check_whole(path)
    left = list(tmp_path.glob("*.tmp"))
    assert left, "none of the kills was in mid-write"
    WeightPublisher(tmp_path, "shm")
    assert not any(path.exists() for path in left)


@pytest.mark.parametrize("full_every", [1, 4])
def test_a_writer_that_was_replaced_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_every: int
) -> None:
    """Suspended before its rename; its successor publishes the same version and the next; then it continues."""
    older = WeightPublisher(tmp_path, "shm", full_every=full_every, epoch=1)
    before = older.write(1, {"w": torch.ones(1000)}.items())
    newer = WeightPublisher(tmp_path, "shm", full_every=full_every, epoch=2)
    published: list[Any] = []
    rename = os.replace

    def suspended(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", rename)
        assert torch.equal(read_verified(before)["w"], torch.ones(1000))
        published.extend(newer.write(version, {"w": torch.full((1000,), 20.0)}.items()) for version in (2, 3))
        rename(source, target)

    monkeypatch.setattr(os, "replace", suspended)
    refused = older.write(2, {"w": torch.full((1000,), 10.0)}.items())
    for manifest in published:
        assert manifest.place != refused.place
        assert torch.equal(read_verified(manifest)["w"], torch.full((1000,), 20.0))
    newer.write(4, {"w": torch.zeros(1000)}.items())
    assert not [path.name for path in tmp_path.iterdir() if "-e1" in path.name]


def test_a_publisher_that_was_replaced_removes_nothing_of_the_next(tmp_path: Path) -> None:
    """Neither a file that is being written, when it starts late, nor versions that are later than its own."""
    WeightPublisher(tmp_path, "shm", epoch=12).write(5, {"w": torch.ones(9)}.items())
    (half := tmp_path / ".weights-00000006-e12.safetensors.77-1.tmp").write_bytes(b"half")
    WeightPublisher(tmp_path, "shm", epoch=3).write(4, {"w": torch.ones(9)}.items())
    assert half.exists()
    assert (tmp_path / "weights-00000005-e12.safetensors").exists()
    WeightPublisher(tmp_path, "shm", epoch=13)
    assert not half.exists()


def _stop_while_writing(folder: Path, pid: int) -> None:
    """It does nothing more, and has half a file: a kill finds it there, however late it comes."""
    give_up_at = time.monotonic() + 200
    while True:
        while not any(size > 1 << 20 for size in _sizes(folder)):
            assert time.monotonic() < give_up_at
        os.kill(pid, signal.SIGSTOP)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < give_up_at
        if any(size > 1 << 20 for size in _sizes(folder)):
            return
        os.kill(pid, signal.SIGCONT)  # that file was whole by then


def _sizes(folder: Path) -> list[int]:
    sizes = []
    for path in folder.glob("*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # it has its name now
            sizes.append(path.stat().st_size)
    return sizes


def _check_whole(path: Path) -> None:
    import json

    with safe_open(path, framework="pt") as file:
        wanted: dict[str, Any] = json.loads(file.metadata()["xxh3"])
        assert {name: checksum(file.get_tensor(name)) for name in wanted} == wanted
