"""A disk that is full when a checkpoint is written: the error a person reads, and what is left."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.trainer_support import make_job

pytest.importorskip("torch")

from penstock.trainer import NotSaved, train

pytestmark = pytest.mark.torch


@pytest.fixture
def full_checkpoints(tmp_path: Path) -> Iterator[Path]:
    """The run's folder of checkpoints, a file system of its own with room for a part of one."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k,mode=700", "none", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def assert_named_and_gone(error: BaseException, folder: Path, step: int) -> None:
    for part in (f"step_{step:08d}", str(folder), "No space left on device", "It takes", "GB are free"):
        assert part in str(error)
    assert list(folder.iterdir()) == []


async def test_a_full_disk_ends_the_trainer_with_the_folder_and_the_bytes(
    tmp_path: Path, tiny_model: str, full_checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmtree = shutil.rmtree

    def remove(*arguments: Any, **options: Any) -> None:
        assert threading.current_thread() is not threading.main_thread(), "the event loop would stand still"
        rmtree(*arguments, **options)

    monkeypatch.setattr("penstock.trainer.state.saver.shutil.rmtree", remove)
    with pytest.raises(NotSaved) as refused:
        await train(make_job(tmp_path, tiny_model, {"checkpoint_every": 2}))
    assert_named_and_gone(refused.value, full_checkpoints, 2)


async def test_a_last_checkpoint_that_fails_is_not_a_stop_on_request(
    tmp_path: Path, tiny_model: str, full_checkpoints: Path
) -> None:
    job = make_job(tmp_path, tiny_model, {"checkpoint_every": 100})
    running = asyncio.create_task(train(job))
    async with asyncio.timeout(60):
        while job.run.queue.version < 3:
            await asyncio.sleep(0.005)
    running.cancel()
    with pytest.raises(NotSaved) as refused:
        await running
    assert_named_and_gone(refused.value, full_checkpoints, job.run.queue.version)
