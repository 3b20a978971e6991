"""A stretch of a run, trained again from checkpoint and archive, gives the run's weights to the bit."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file
from trainer_support import crash, final_weights, make_job

from penstock.common import iter_jsonl
from penstock.trainer import BadJob, ReplayJob, TrainJob, replay_steps, train
from penstock.trainer.replay import clip_share
from penstock.transfer_queue import Archive, BadPayload

pytestmark = pytest.mark.torch


def again(job: TrainJob, folder: Path, first: int, last: int, **changes: Any) -> ReplayJob:
    folder.mkdir()
    config = job.config.model_copy(update=changes)
    archive = Archive(job.archive.folder) if job.archive else Archive(folder)
    return ReplayJob(replace(job, run_dir=folder, config=config, archive=None), job, archive, first, last)


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> TrainJob:
    """Six steps, of which a trainer died after the third; checkpoints after steps 4 and 6 are left."""
    job = make_job(tmp_path_factory.mktemp("run"), tiny_model, {"minibatches": 2}, archives=True)

    async def live() -> None:
        await crash(job, "after", "publish_version", 4)
        await train(job)

    asyncio.run(live())
    return job


@pytest.mark.parametrize("first", [0, 4])
async def test_unchanged_it_gives_the_weights_of_the_run_across_a_kill(
    killed_run: TrainJob, tmp_path: Path, first: int
) -> None:
    result = await replay_steps(again(killed_run, tmp_path / "again", first, 6))
    assert (result["steps_equal"], result["steps_different"], result["weights_equal"]) == (6 - first, 0, True)
    weights = load_file(tmp_path / "again" / "final_model" / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in final_weights(killed_run).items())
    assert json.loads((tmp_path / "again" / "replay.json").read_text()) == result


async def test_with_another_loss_it_says_how_far_off_policy_it_is(killed_run: TrainJob, tmp_path: Path) -> None:
    result = await replay_steps(again(killed_run, tmp_path / "again", 0, 6, loss="gspo"))
    assert (result["changed"], result["steps_equal"], result["weights_equal"]) == (True, 0, None)
    steps = list(iter_jsonl(tmp_path / "again" / "metrics.jsonl"))
    assert 0.0 < result["effective_sample_share_min"] == min(step["effective_sample_share"] for step in steps) < 1.0
    assert 0.0 <= result["clip_share_max"] == max(map(clip_share, steps)) < 1.0
    weights = load_file(tmp_path / "again" / "final_model" / "model.safetensors")
    assert not all(torch.equal(weights[name], tensor) for name, tensor in final_weights(killed_run).items())


async def test_it_ends_before_a_batch_from_which_it_departed_too_far(killed_run: TrainJob, tmp_path: Path) -> None:
    result = await replay_steps(again(killed_run, tmp_path / "again", 0, 6, lr=3.0))
    steps = list(iter_jsonl(tmp_path / "again" / "metrics.jsonl"))
    assert 0 < result["last"] == len(steps) < 6
    assert re.match(rf"step {len(steps)}: the effective sample share is .* trainer.lr", result["refused"])
    assert all(step["effective_sample_share"] >= 0.1 for step in steps)
    assert (tmp_path / "again" / "final_model" / "model.safetensors").exists()


async def test_other_rewards_are_trained_as_off_policy_batches(killed_run: TrainJob, tmp_path: Path) -> None:
    replayed = again(killed_run, tmp_path / "again", 0, 6)
    batches, own = replayed.archive.batches(0, 6), Archive(tmp_path / "own", "", 1 << 30)
    for step, groups in batches.items():
        before = replayed.archive.read(step, [name for group in groups for name in group]).values()
        own.append(step, [replace(one, reward=1.0 - (one.reward or 0.0)) for one in before])
    own.commit(6, batches)
    result = await replay_steps(replace(replayed, archive=own, has_new_rewards=True))
    assert (result["changed"], result["steps_equal"], result["refused"], result["last"]) == (True, 0, None, 6)
    recorded = {line["step"]: line["reward"] for line in iter_jsonl(killed_run.run_dir / "metrics.jsonl")}
    for line in iter_jsonl(tmp_path / "again" / "metrics.jsonl"):
        assert line["reward"] == pytest.approx(1.0 - recorded[line["step"]])
    weights = load_file(tmp_path / "again" / "final_model" / "model.safetensors")
    assert not all(torch.equal(weights[name], tensor) for name, tensor in final_weights(killed_run).items())


async def test_without_some_steps_the_weights_are_those_of_the_others_alone(
    killed_run: TrainJob, tmp_path: Path
) -> None:
    replayed = again(killed_run, tmp_path / "again", 4, 6)
    everything = {one for groups in replayed.archive.batches(4, 6).values() for group in groups for one in group}
    result = await replay_steps(replace(replayed, left_out=everything))
    assert (result["changed"], result["steps_trained"], result["last"], result["refused"]) == (True, 0, 6, None)
    start = await replay_steps(again(killed_run, tmp_path / "start", 0, 4))
    assert start["weights_equal"]
    weights, expected = (load_file(tmp_path / one / "final_model" / "model.safetensors") for one in ("again", "start"))
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


async def test_without_an_episode_its_group_is_trained_as_a_smaller_one(killed_run: TrainJob, tmp_path: Path) -> None:
    replayed = again(killed_run, tmp_path / "again", 4, 6)
    name = replayed.archive.batches(4, 5)[4][0][0]
    result = await replay_steps(replace(replayed, left_out={name}))
    assert (result["steps_trained"], result["left_out"], result["steps_equal"]) == (2, 1, 0)
    before = {line["step"]: line["episodes"] for line in iter_jsonl(killed_run.run_dir / "metrics.jsonl")}
    lines = {line["step"]: line["episodes"] for line in iter_jsonl(tmp_path / "again" / "metrics.jsonl")}
    assert lines == {4: before[4] - 1, 5: before[5]}


def test_another_model_begins_without_the_checkpoint(killed_run: TrainJob, tmp_path: Path) -> None:
    replayed = again(killed_run, tmp_path / "again", 4, 6)
    assert replayed.start == killed_run.run_dir / "checkpoints" / "step_00000004"
    other = replace(replayed.job, run=replace(replayed.job.run, model="another"))
    assert replace(replayed, job=other).start is None


@pytest.mark.parametrize(
    ("first", "last", "changes", "error", "message"),
    [
        (3, 6, {}, BadJob, "--from 3: no checkpoint is after that step; there are 0, 4, 6"),
        (4, 4, {}, BadJob, "there is no step between them"),
        (4, 9, {}, BadPayload, "step 6 is not in the archive; its index has steps 0 to 5"),
        (0, 6, {"steps": 5}, BadJob, "trainer.steps is 5, and --to 6 is after them"),
        (0, 6, {"correction": None}, BadJob, "trainer.correction"),
        (0, 6, {"advantage": "remax"}, BadJob, "needs a greedy episode per group"),
    ],
)
async def test_what_cannot_be_replayed_is_refused_by_name(
    killed_run: TrainJob,
    tmp_path: Path,
    first: int,
    last: int,
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        await replay_steps(again(killed_run, tmp_path / "again", first, last, **changes))


async def test_a_step_without_a_checkpoint_is_replayed_from_its_files(tmp_path: Path, tiny_model: str) -> None:
    """The run ended before a commit: nothing is in the index yet."""
    job = make_job(tmp_path, tiny_model, {"checkpoint_every": 100}, archives=True)
    await crash(job, "before", "publish_version", 4)
    result = await replay_steps(again(job, tmp_path / "again", 0, 2))
    assert (result["steps_equal"], result["steps_different"]) == (2, 0)
