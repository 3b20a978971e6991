"""A run that is over before its last step: when, what it leaves, and that every life comes to the same verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from trainer_support import crash, make_job, make_trajectory, metrics, write_rows

from penstock.trainer import BadJob, Stopping, TrainJob, train
from penstock.trainer.config import StopConfig
from penstock.transfer_queue import Trajectory

pytestmark = pytest.mark.torch


def verdict(values: Sequence[Any], **settings: Any) -> str | None:
    stopping = Stopping(StopConfig(**{"metric": "reward", **settings}))
    metric = settings.get("metric", "reward")
    stopping.begin({"version": number + 1, metric: value} for number, value in enumerate(values))
    return stopping.why()


def test_a_target_is_reached_by_the_newest_value() -> None:
    assert verdict([0.2, 0.8], target=0.9) is None
    assert verdict([0.95, 0.8], target=0.9) is None, "it was luck"
    assert verdict([0.2, 0.9], target=0.9) == "reward is 0.9 at version 2: the target 0.9 is reached"
    assert verdict([0.2, 0.1], target=0.1, better="lower") == "reward is 0.1 at version 2: the target 0.1 is reached"


def test_rewards_that_differ_by_rounding_are_one_value() -> None:
    rounded = 0.7 + 0.2 + 0.1
    assert verdict([0.2, rounded], target=1.0) is not None
    assert verdict([0.2, 1.0], target=rounded) is not None
    assert verdict([0.2, 0.999], target=1.0) is None
    assert verdict([0.7, 0.7 - 0.2 - 0.5], target=-1e-9, better="lower") is not None
    assert verdict([0.2, rounded, 1.0], patience=1) is not None, "1 is not better"
    assert verdict([3e-6, 2e-6], target=1.5e-6, better="lower", metric="lr") is None, "no reward"


def test_a_window_is_filled_before_it_counts() -> None:
    assert verdict([1.0], target=0.9, window=2) is None
    assert verdict([0.0, 1.0], target=0.9, window=2) is None
    said = verdict([0.0, 0.9, 1.0], target=0.9, window=2)
    assert said == "the mean of 2 values of reward is 0.95 at version 3: the target 0.9 is reached"


@pytest.mark.parametrize(
    ("values", "better", "over"),
    [
        ([0.1, 0.2, 0.3], "higher", False),
        ([0.3, 0.2], "higher", False),
        ([0.3, 0.2, 0.3], "higher", True),
        ([0.3, 0.2, 0.4], "higher", False),
        ([0.3, 0.2, 0.1], "lower", False),
        ([0.1, 0.2, 0.3], "lower", True),
    ],
)
def test_patience_ends_with_the_last_value_that_was_no_better(values: list[float], better: str, over: bool) -> None:
    assert (verdict(values, patience=2, better=better) is not None) == over


def test_it_says_since_when_nothing_got_better() -> None:
    assert verdict([0.1, 0.5, 0.2, 0.3], patience=2) == "reward is not better than 0.5, of version 2, in 2 values since"


def test_what_is_no_number_counts_for_nothing_and_without_conditions_nothing_ends() -> None:
    assert verdict([0.3, None, float("nan"), "x", 0.2], patience=2) is None
    assert verdict([1.0, 0.0, 0.0, 0.0]) is None


def rising(task_id: str, member: int, version: int) -> Trajectory:
    """The n-th task of the stream has n of four members with reward 1: step s has a mean of about s / 2."""
    number = int(task_id.rpartition("/")[2])
    return replace(make_trajectory(task_id, member, version), reward=float(member < number))


TARGET = {"metric": "reward", "target": 0.6}
"""The means of steps 0, 1, 2 are 0.125, 0.625, 1."""


def make(folder: Path, model: str, stop: dict[str, Any], **settings: Any) -> TrainJob:
    evals = write_rows(folder / "eval.jsonl", 3)
    job = make_job(folder, model, {"checkpoint_every": 100, **settings, "stop": stop}, data={"eval": evals})
    job.run.queue.produce = rising
    return job


def check_over(job: TrainJob, version: int, why: str) -> None:
    """It ended as after its last step."""
    assert len(metrics(job.run_dir.parent)) == version
    assert (job.run.queue.version, job.run.queue.committed) == (version, version)
    assert (job.run_dir / "checkpoints" / f"step_{version:08d}" / "complete").exists()
    assert (job.run_dir / "final_model" / "model.safetensors").exists()
    assert json.loads((job.run_dir / "ended.json").read_text()) == {"version": version, "why": why}
    evaluations = [json.loads(line) for line in (job.run_dir / "eval.jsonl").read_text().splitlines()]
    assert evaluations[-1]["version"] == version


REACHED = "reward is 0.625 at version 2: the target 0.6 is reached"


async def test_at_the_target_a_run_saves_commits_and_leaves_its_model(
    tmp_path: Path, tiny_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = make(tmp_path, tiny_model, TARGET)
    with caplog.at_level("INFO"):
        await train(job)
    check_over(job, 2, REACHED)
    assert f"the run is over at version 2: {REACHED}" in caplog.text
    await train(job)
    check_over(job, 2, REACHED)


@pytest.mark.parametrize(("moment", "call"), [("after", "publish_version"), ("before", "commit"), ("after", "commit")])
async def test_a_restarted_trainer_comes_to_the_same_verdict(
    tmp_path: Path, tiny_model: str, moment: str, call: str
) -> None:
    job = make(tmp_path, tiny_model, TARGET)
    await crash(job, moment, call, 2)
    await train(job)
    check_over(job, 2, REACHED)


async def test_a_run_that_was_over_goes_on_under_another_target(tmp_path: Path, tiny_model: str) -> None:
    job = make(tmp_path, tiny_model, TARGET)
    await train(job)
    further = make(tmp_path, tiny_model, {**TARGET, "target": 2.0})
    await train(replace(further, run=job.run))
    check_over(job, 6, "all 6 steps are trained")


async def test_patience_with_evaluations(tmp_path: Path, tiny_model: str) -> None:
    """Evaluations always find the same reward."""
    job = make(tmp_path, tiny_model, {"metric": "eval/reward", "patience": 2}, eval_every=1, steps=60)
    await train(job)
    ended = json.loads((job.run_dir / "ended.json").read_text())
    assert "in 2 values since" in ended["why"]
    assert 3 <= ended["version"] < 60
    check_over(job, ended["version"], ended["why"])


async def test_a_metric_that_no_step_has_is_refused(tmp_path: Path, tiny_model: str) -> None:
    with pytest.raises(BadJob, match=r"trainer\.stop\.metric is 'rewart'.*did you mean 'reward'"):
        await train(make(tmp_path, tiny_model, {"metric": "rewart", "target": 0.5}))
