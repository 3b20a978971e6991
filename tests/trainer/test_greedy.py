"""ReMax's greedy member: its return is the others' baseline; neither it nor a group without it is trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from trainer_support import make_job, make_trajectory

from penstock.common import read_jsonl
from penstock.trainer import ModelLimits, StepBatch, TrainerConfig, make_step_batch, train
from penstock.trainer.batch import without_greedy
from penstock.trainer.credit import TokenScores, episodes_of
from penstock.transfer_queue import Batch

pytestmark = pytest.mark.torch


def batch_of(members: list[list[int]], rewards: list[float]) -> StepBatch:
    made = [make_trajectory(f"train/{g}", m, 0) for g, group in enumerate(members) for m in group]
    given = [replace(t, reward=r) for t, r in zip(made, rewards, strict=True)]
    names = [[f"train/{g}#{m}" for m in group] for g, group in enumerate(members)]
    return make_step_batch(Batch(0, names), range(len(members)), given, 0, ModelLimits(context=64, vocab=64))


def test_the_baseline_is_the_groups_greedy_return() -> None:
    batch = batch_of([[1, 0, 2], [0, 3], [1, 10]], [1.0, 0.5, 0.0, 2.0, 3.0, 7.0, 8.0])
    found = episodes_of(batch, TrainerConfig(), TokenScores())
    assert found.greedy is not None
    assert found.greedy.tolist() == [0.5, 0.5, 0.5, 2.0, 2.0, 0.0, 0.0]


def test_what_is_trained() -> None:
    batch = batch_of([[1, 0], [1, 10]], [1.0, 0.5, 7.0, 8.0])
    assert [bool(row.mask.any()) for row in without_greedy(batch).rows] == [True, False, False, False]
    assert [bool(row.mask.all()) for row in batch.rows] == [True] * 4


async def test_a_run_asks_for_a_greedy_member(tmp_path: Path, tiny_model: str) -> None:
    asked = []
    job = make_job(tmp_path, tiny_model, {"advantage": "remax", "loss": "reinforce", "steps": 2})
    submit = job.run.queue.submit

    async def noted(tasks, **more):
        asked.extend(tasks)
        return await submit(tasks, **more)

    job.run.queue.submit = noted
    await train(job)
    assert {task.sampling["greedy_member"] for task in asked} == {0}
    lines = list(read_jsonl(job.run_dir / "metrics.jsonl"))
    assert len(lines) == 2
    # Two groups of four: at least a quarter of the tokens is the greedy members'.
    assert all(line["updates"] == 1 for line in lines)
    assert all(line["tokens_trained"] + line["tokens_masked"] == line["tokens_sampled"] for line in lines)
    assert all(line["tokens_masked"] > 0 for line in lines)
