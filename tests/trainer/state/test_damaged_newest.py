"""The newest checkpoint is damaged and its steps are committed: the archive has them, and no update is lost."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

pytest.importorskip("torch")

from trainer_support import assert_weights, check_accounts, crash, final_weights, lines, make_job

from penstock.trainer import TrainJob, train
from penstock.transfer_queue import Archive

STEPS = range(6)


async def damaged(folder: Path, model: str, moment: str = "after") -> TrainJob:
    """A run that died around the commit of step 4, with the checkpoint of step 4 cut and that of step 2 whole."""
    job = make_job(folder, model, archives=True)
    await die(job, moment)
    return job


async def die(job: TrainJob, moment: str) -> None:
    await crash(job, moment, "commit", 4)
    shard = job.run_dir / "checkpoints" / "step_00000004" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])


@pytest.fixture
async def reference(tmp_path: Path, tiny_model: str) -> dict[str, object]:
    (tmp_path / "undisturbed").mkdir()
    job = make_job(tmp_path / "undisturbed", tiny_model)
    await train(job)
    return final_weights(job)


@pytest.mark.parametrize("archive_bytes", [1 << 30, 0])
@pytest.mark.parametrize("moment", ["before", "after"])
async def test_no_update_is_lost(
    tmp_path: Path,
    tiny_model: str,
    reference: dict[str, object],
    moment: str,
    archive_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer_support.archive_in", lambda folder: Archive(folder / "archive", "test", archive_bytes))
    job = await damaged(tmp_path, tiny_model, moment)
    await die(job, "before")  # a replay is as safe from a crash as what it repeats
    await train(job)
    await check_accounts(job)
    assert_weights(job, reference)
    assert not any(line.get("update_lost") for line in lines(job, "steps.jsonl"))
    archive = Archive(tmp_path / "archive")
    assert archive.verify() == []
    if archive_bytes:
        assert archive.index()["step"].to_pylist() == [step for step in STEPS for _ in range(8)]


@pytest.mark.parametrize("damage", ["cut", "missing", "disabled"])
async def test_without_the_archive_they_are_counted_and_trained_no_second_time(
    tmp_path: Path, tiny_model: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = await damaged(tmp_path, tiny_model)
    for path in (tmp_path / "archive" / "batches").glob("00000003-*"):
        if damage == "cut":
            path.write_bytes(path.read_bytes()[:-1])
        else:
            path.unlink()
    if damage == "disabled":
        job = make_job(tmp_path, tiny_model, queue=job.run.queue)
    with caplog.at_level(logging.ERROR):
        await train(job)
    assert "the updates of steps 2 to 3 are lost" in caplog.text
    assert [line["step"] for line in lines(job, "steps.jsonl") if line.get("update_lost")] == [2, 3]
    (job.run_dir / "checkpoints" / "step_00000006" / "complete").unlink()
    for kept in (job.run_dir / "checkpoints").glob("step_00000004"):
        (kept / "complete").unlink()
    await train(job)
    assert [line["step"] for line in lines(job, "steps.jsonl") if line.get("update_lost")] == [2, 3, 4, 5]
