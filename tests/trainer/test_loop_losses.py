"""Whole runs whose queue loses payloads or entries, or has episodes that cannot be trained."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from trainer_support import (
    assert_books_balance,
    crash,
    final_weights,
    lines,
    make_job,
    make_trajectory,
)

from penstock.trainer import NotResumable, PayloadsLost, TrainJob, train
from penstock.trainer.state.checkpoint import RecentBatches
from penstock.transfer_queue import Announcement, Trajectory
from penstock.weight_sync import Manifest, read_verified

pytestmark = pytest.mark.torch


async def test_lost_updates_are_said_and_lost_checkpoints_stop(
    tmp_path: Path, tiny_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(tmp_path, tiny_model)
    await crash(job, "after", "commit", 4)
    (job.run_dir / "checkpoints" / "step_00000004" / "complete").unlink()
    with caplog.at_level(logging.ERROR):
        await train(job)
    assert "the updates of steps 2, 3, 16 episodes, are lost" in caplog.text
    assert [line["step"] for line in lines(job, "steps.jsonl") if line.get("update_lost")] == [2, 3]
    assert job.run.queue.committed == 6
    assert sorted(p.name for p in (job.run_dir / "checkpoints").iterdir()) == [
        "step_00000002",
        "step_00000004.damaged",
        "step_00000006",
    ]
    for marker in (job.run_dir / "checkpoints").glob("*/complete"):
        marker.unlink()
    with pytest.raises(NotResumable, match=r"committed 6 steps, and .* holds no whole checkpoint"):
        await train(job)


async def lose_entries(job: TrainJob, call: str, number: int) -> None:
    """The trainer dies after the commit of step 4, and the queue loses what came after this call with its machine."""
    job.run.queue.durable_until = (call, number)
    await crash(job, "after", "commit", 4)
    job.run.queue.lose_the_last_second()


@pytest.mark.parametrize("lost", [1, 3])
async def test_a_step_goes_on_without_lost_payloads(tmp_path: Path, tiny_model: str, lost: int) -> None:
    """One of a group of four, or three: then the fourth leaves with them."""
    job = make_job(tmp_path, tiny_model)
    job.run.queue.lose_at = (2, lost)
    await train(job)
    trained = {episode for line in lines(job, "steps.jsonl") for episode in line["episodes"]}
    status = await job.run.queue.status()
    skipped = 1 if lost == 1 else 4
    assert (status.version, status.episodes["payload_lost"], status.groups["payload_lost"]) == (6, skipped, lost // 3)
    assert len(trained) == 6 * 8 - skipped
    assert not trained & set(job.run.queue.lost)
    assert status.episodes["completed"] == status.episodes["committed"] + len(await job.run.queue.held()) + skipped


async def test_lost_payloads_end_a_strict_run(tmp_path: Path, tiny_model: str) -> None:
    job = make_job(tmp_path, tiny_model, lost_payloads="strict")
    job.run.queue.lose_at = (2, 1)
    with pytest.raises(PayloadsLost, match=r"step 2.*--resume transfer_queue\.lost_payloads=drop"):
        await train(job)
    await train(replace(job, lost_payloads="drop"))
    assert (await job.run.queue.status()).episodes["payload_lost"] == 1


async def test_a_step_of_which_nothing_is_left_is_passed_with_the_weights_before(
    tmp_path: Path, tiny_model: str
) -> None:
    job = make_job(tmp_path, tiny_model)
    job.run.queue.lose_at = (2, 8)
    await train(job)
    status = await job.run.queue.status()
    assert (status.version, status.committed_step, status.episodes["payload_lost"]) == (6, 6, 8)
    assert [line["updates"] for line in lines(job, "metrics.jsonl")] == [1, 1, 0, 1, 1, 1]
    before, after = ([entry.xxh3 for entry in Manifest.parse(one.manifest).tensors] for one in announced(job, 2, 3))
    assert before == after


async def test_an_empty_step_that_was_published_does_not_count_again(tmp_path: Path, tiny_model: str) -> None:
    """A passed step has no groups either, and counts as little."""
    job = make_job(tmp_path, tiny_model, {"checkpoint_every": 100})
    job.run.queue.lose_at = (2, 8)
    await crash(job, "after", "publish_version", 4)
    await train(replace(job, config=job.config.model_copy(update={"max_bad_steps": 0})))
    assert job.run.queue.version == 6


async def test_other_weights_of_the_last_version_get_the_next_number(tmp_path: Path, tiny_model: str) -> None:
    """No step follows that would publish it, and the last evaluation would wait for a file that is gone."""
    job = make_job(tmp_path, tiny_model, {"checkpoint_every": 4})
    await crash(job, "after", "publish_version", 6)
    shutil.rmtree(job.weights_dir)
    await train(replace(job, config=job.config.model_copy(update={"lr": 1e-2})))
    (newest,) = announced(job, 7)
    assert job.run.queue.version == 7
    final = final_weights(job)
    published = read_verified(Manifest.parse(newest.manifest))
    assert all(torch.equal(published[name], final[name]) for name in final)


def announced(job: TrainJob, *versions: int) -> list[Announcement]:
    return [one for one in job.run.queue.announced if one.version in versions]


def foreign_tokens(bad: Callable[[str], bool]) -> Callable[[str, int, int], Trajectory]:
    """Episodes for which `bad` is true have a token that the trainer's model does not know."""

    def produce(task_id: str, member: int, version: int) -> Trajectory:
        trajectory = make_trajectory(task_id, member, version)
        if not bad(trajectory.episode_id):
            return trajectory
        return replace(trajectory, segments=[replace(trajectory.segments[0], prompt_ids=np.full(3, 64, np.int32))])

    return produce


@pytest.mark.parametrize(("first_task_only", "left"), [(True, 4), (False, 8)])
async def test_episodes_that_cannot_be_trained_leave_their_step(
    tmp_path: Path, tiny_model: str, first_task_only: bool, left: int
) -> None:
    """All of one group, or all of the step, which then changes no weight."""
    last = 5 if first_task_only else 6  # step 2 has the tasks 4 and 5
    bad = tuple(f"train/0000/{task:08d}#" for task in range(4, last))
    job = make_job(tmp_path, tiny_model)
    job.run.queue.produce = foreign_tokens(lambda episode: episode.startswith(bad))
    await train(job)
    status = await job.run.queue.status()
    assert (status.version, status.committed_step, status.episodes["payload_lost"]) == (6, 6, left)
    assert [line["updates"] for line in lines(job, "metrics.jsonl")][2] == (1 if first_task_only else 0)
    assert status.episodes["committed"] == 6 * 8 - left


LOST = [*(("lease_batch", n) for n in range(4)), *(("publish_version", n) for n in range(1, 4)), ("commit", 2)]


@pytest.mark.parametrize(("call", "number"), LOST)
async def test_a_queue_that_lost_its_last_second_trains_nothing_twice(
    tmp_path: Path, tiny_model: str, call: str, number: int
) -> None:
    job = make_job(tmp_path, tiny_model)
    await lose_entries(job, call, number)
    assert job.run.queue.committed < 4
    await train(job)
    assert_books_balance(await job.run.queue.status(), job.run_dir, 6)
    assert job.run.queue.version == 6


async def test_after_catching_up_the_weights_are_announced_anew(
    tmp_path: Path, tiny_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(tmp_path, tiny_model)
    await lose_entries(job, "publish_version", 2)
    await crash(job, "before", "lease_batch", 4)
    assert "behind the checkpoint: it lost its latest entries and is brought forward to version 4" in caplog.text
    assert "the weights of version 4 were gone; written again" in caplog.text
    latest = await job.run.queue.latest_version()
    assert (latest.version, job.run.queue.committed) == (4, 4)
    read_verified(Manifest.parse(latest.manifest))


async def test_a_queue_further_behind_than_the_checkpoint_remembers_is_refused(
    tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.trainer.state.saver.RecentBatches", partial(RecentBatches, keep_s=0.0))
    job = make_job(tmp_path, tiny_model)
    await lose_entries(job, "lease_batch", 0)
    with pytest.raises(NotResumable, match=r"of version 4, the queue is at 0 and lacks step 1, .* not of one run"):
        await train(job)
