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


async def test_without_an_archive_they_are_counted_and_trained_no_second_time(
    tmp_path: Path, tiny_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(tmp_path, tiny_model, queue=(await damaged(tmp_path, tiny_model)).run.queue)
    with caplog.at_level(logging.ERROR):
        await train(job)
    assert "the updates of steps 2, 3, 16 episodes, are lost" in caplog.text
    assert [line["step"] for line in lines(job, "steps.jsonl") if line.get("update_lost")] == [2, 3]
    for kept in (job.run_dir / "checkpoints").glob("step_0000000[46]"):
        (kept / "complete").unlink()
    await train(job)
    assert [line["step"] for line in lines(job, "steps.jsonl") if line.get("update_lost")] == [2, 3, 4, 5]


@pytest.mark.parametrize("damage", ["cut", "missing"])
async def test_a_step_that_the_archive_lacks_takes_no_other_along(tmp_path: Path, tiny_model: str, damage: str) -> None:
    job = await damaged(tmp_path, tiny_model)
    (path,) = (tmp_path / "archive" / "batches").glob("00000002-*")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    await die(job, "before")  # what is lost is known in the next life too
    await train(job)
    recorded = {line["step"]: line for line in lines(job, "steps.jsonl")}
    assert len(lines(job, "steps.jsonl")) == len(recorded) == len(STEPS)
    assert [len(recorded[step]["episodes"]) for step in STEPS] == [8] * len(STEPS)
    assert [step for step in STEPS if recorded[step].get("update_lost")] == [2]
    assert [line["updates"] for line in lines(job, "metrics.jsonl")] == [1, 1, 0, 1, 1, 1]
    assert Archive(tmp_path / "archive").index()["step"].to_pylist() == [
        step for step in STEPS if step != 2 for _ in range(8)
    ]


async def test_a_step_without_episodes_is_no_lost_update(tmp_path: Path, tiny_model: str) -> None:
    """All of them had left it before it was trained."""
    weights = []
    for name in ("undisturbed", "damaged"):
        (tmp_path / name).mkdir()
        job = make_job(tmp_path / name, tiny_model, archives=True)
        job.run.queue.lose_at = (2, 8)
        if name == "damaged":
            await die(job, "after")
        await train(job)
        weights.append(final_weights(job))
        assert [line["updates"] for line in lines(job, "metrics.jsonl")] == [1, 1, 0, 1, 1, 1]
        assert not any(line.get("update_lost") for line in lines(job, "steps.jsonl"))
    assert_weights(job, weights[0])
