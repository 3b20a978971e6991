"""A bisection over real replays of a tiny model, whose archive has two planted episodes that spoil it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.tiny_model import save_tiny_model
from tests.trainer.trainer_support import make_job

torch = pytest.importorskip("torch")

from transformers import AutoModelForCausalLM

from penstock.deploy.bisection.cause import cause_of
from penstock.deploy.bisection.collapse import Stretch
from penstock.deploy.bisection.tries import Judgement, Tries, TryResult
from penstock.trainer import ReplayJob, TrainJob, replay_steps, train
from penstock.transfer_queue import Archive, Trajectory

pytestmark = pytest.mark.torch
SPOILT, STEPS = 3, 6
SETTINGS = {"advantage": "dr_grpo", "max_grad_norm": 1e9, "lr": 2e-3, "eps": 1.0, "steps": STEPS}
"""Rewards of 0 and 1 hardly move the weights under this epsilon, one of a million does."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    """A run of six steps, whose archive then gets rewards of a million for an episode in each group of step 3."""
    folder = tmp_path_factory.mktemp("run")
    model = save_tiny_model(tmp_path_factory.mktemp("model"), tokenizer=True, tie_word_embeddings=True)
    job = make_job(folder, model, SETTINGS, archives=True)
    asyncio.run(train(job))
    assert job.archive is not None
    spoilt = Archive(folder / "spoilt", "run", 1 << 30)
    batches = job.archive.batches(0, STEPS)
    for step in batches:
        spoilt.append(step, [planted(one, step) for one in episodes_of(job.archive, step)])
    spoilt.commit(STEPS, batches)
    return replace(job, archive=spoilt)


def planted(one: Trajectory, step: int) -> Trajectory:
    return replace(one, reward=1e6) if step == SPOILT and one.episode_id.endswith("#1") else one


def episodes_of(archive: Archive, step: int) -> list[Trajectory]:
    names = [name for group in archive.batches(step, step + 1)[step] for name in group]
    return list(archive.read(step, names).values())


class ReplayedTries(Tries):
    """Replays in this process. Weights are judged by how far they are from those of the start."""

    job: TrainJob
    scratch: Path
    count = 0

    def _carry_out(self, stretch: Stretch, left_out: Collection[str | int]) -> TryResult:
        self.count += 1
        folder, archive = self.scratch / str(self.count), self.job.archive
        assert archive is not None
        folder.mkdir()
        batches = archive.batches(stretch.start, stretch.end)
        names = {
            name for step, groups in batches.items() for group in groups for name in group if {step, name} & {*left_out}
        }
        own = replace(self.job, run_dir=folder, archive=None)
        replay = ReplayJob(own, self.job, archive, stretch.start, stretch.end, True, names)
        result = asyncio.run(replay_steps(replay))
        if result["refused"]:
            return TryResult(None, refused=result["refused"])
        closeness = 1.0 - distance(folder / "final_model", Path(self.job.run.model))
        return TryResult(closeness, closeness, closeness)


def distance(one: Path, other: Path) -> float:
    """The largest change of a weight, as a share of 0.001."""
    first, second = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (one, other))
    return max(float((first[name].float() - second[name].float()).abs().max()) for name in first) / 1e-3


def test_replays_of_a_real_trainer_lead_to_the_planted_episodes(run: TrainJob, tmp_path: Path) -> None:
    assert run.archive is not None
    tries = ReplayedTries(run.run_dir, tmp_path, 40, Judgement("reward", 0.5, (), 1, 1.0), Console(quiet=True))
    tries.job, tries.scratch = run, tmp_path
    cause = cause_of(tries, [Stretch(0, SPOILT + 2, SPOILT + 2, (0,))], run.archive)
    planted_ones = {one.episode_id for one in episodes_of(run.archive, SPOILT) if one.reward == 1e6}
    assert (cause.steps.items, cause.steps.is_minimal) == ((SPOILT,), True)
    assert {one.episode for one in cause.episodes.items} == planted_ones
    assert cause.episodes.is_minimal
