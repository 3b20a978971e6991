"""A disk that is full when a checkpoint is written: the error a person reads, and what is left."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.small_disk import small_disk
from tests.trainer.trainer_support import make_job, make_segment
from tests.until import until

pytest.importorskip("torch")

from penstock.trainer import NotSaved, Ranks, SftConfig, SftJob, TrainerConfig, fine_tune, train, write_conversations
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.trainer.export import save_final_model
from penstock.trainer.service import ClientModels

pytestmark = pytest.mark.torch


@pytest.fixture
def full_checkpoints(tmp_path: Path) -> Iterator[Path]:
    """The run's folder of checkpoints, a file system of its own with room for a part of one."""
    with small_disk(tmp_path / "run" / "checkpoints", 128) as folder:
        yield folder


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

    monkeypatch.setattr("penstock.trainer.state.checkpoint.shutil.rmtree", remove)
    with pytest.raises(NotSaved) as refused:
        await train(make_job(tmp_path, tiny_model, {"checkpoint_every": 2}))
    assert_named_and_gone(refused.value, full_checkpoints, 2)


async def test_a_last_checkpoint_that_fails_is_not_a_stop_on_request(
    tmp_path: Path, tiny_model: str, full_checkpoints: Path
) -> None:
    job = make_job(tmp_path, tiny_model, {"checkpoint_every": 100})
    running = asyncio.create_task(train(job))
    await until(lambda: job.run.queue.version >= 3)
    running.cancel()
    with pytest.raises(NotSaved) as refused:
        await running
    assert_named_and_gone(refused.value, full_checkpoints, job.run.queue.version)


def sft_job(folder: Path, model: str, **trainer: Any) -> SftJob:
    dice = np.random.default_rng(0)
    write_conversations(folder / "train", [make_segment(dice, 0) for _ in range(6)])
    config = TrainerConfig(sinks=(), **trainer)
    return SftJob(model, config, SftConfig(batch=3, lr=1e-2), folder / "run", folder / "train")


async def test_a_full_disk_ends_fine_tuning_with_the_folder_and_the_bytes(
    tmp_path: Path, tiny_model: str, full_checkpoints: Path
) -> None:
    with pytest.raises(NotSaved) as refused:
        await fine_tune(sft_job(tmp_path, tiny_model, steps=4, checkpoint_every=2))
    assert_named_and_gone(refused.value, full_checkpoints, 2)


async def test_a_last_checkpoint_of_fine_tuning_that_fails_is_not_a_stop_on_request(
    tmp_path: Path, tiny_model: str, full_checkpoints: Path
) -> None:
    job = sft_job(tmp_path, tiny_model, steps=100000, checkpoint_every=100000)
    running, metrics = asyncio.create_task(fine_tune(job)), job.run_dir / "metrics.jsonl"
    await until(lambda: metrics.exists() and bool(metrics.read_text()))
    running.cancel()
    with pytest.raises(NotSaved) as refused:
        await running
    assert "No space left on device" in str(refused.value)
    assert list(full_checkpoints.iterdir()) == []


@pytest.mark.parametrize("room_kb", [-16, 12], ids=["weights", "tokenizer"])
def test_a_full_disk_leaves_no_part_of_a_final_model(
    room_kb: int, tmp_path: Path, tiny_model: str, ranks: Ranks
) -> None:
    """`room_kb`: size of the disk without the weights. After the weights at least four files of 4 kB are written."""
    weights_kb = -(-(Path(tiny_model) / "model.safetensors").stat().st_size // 4096) * 4
    engine = FSDPEngine(tiny_model, TrainerConfig(), ranks)
    with small_disk(tmp_path / "final_model.tmp", weights_kb + room_kb) as folder:
        with pytest.raises(NotSaved) as refused:
            save_final_model(engine, ranks, tiny_model, tmp_path / "final_model")
        for part in (str(folder), "No space left on device", "It takes", "GB that are free"):
            assert part in str(refused.value)
        assert list(folder.iterdir()) == []
    assert not (tmp_path / "final_model").exists()


def test_a_full_disk_leaves_no_part_of_a_clients_state(tmp_path: Path, tiny_model: str, ranks: Ranks) -> None:
    models = ClientModels(tiny_model, TrainerConfig(dtype="float32", lora={"rank": 8, "alpha": 16.0}), ranks)
    models.create("a", 8, seed=1)
    with small_disk(tmp_path / "disk", 16) as disk:
        with pytest.raises(NotSaved) as refused:
            models.save("a", disk / "saved", with_optimizer=True)
        assert str(disk / "saved") in str(refused.value)
        with pytest.raises(NotSaved, match="No space left on device"):
            models.write_point(disk / "points", 1)
        assert [path.name for path in disk.rglob("*")] == ["points"]
