"""Teachers in the step: the row, the pack, advantage and loss by hand, mixtures, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from one_step import Step
from trainer_support import assert_weights, crash, final_weights, make_job, make_trajectory, taught

from penstock.trainer import Ranks, pack_rows, train

pytestmark = pytest.mark.torch
ALONE = {"reward_weight": 0.0}


class TaughtStep(Step):
    """Two groups of three; the first group has a teacher, and its first episode two segments."""

    def __init__(self, model: str, ranks: Ranks, teachers: bool = True, top_k: int = 0, **settings: Any) -> None:
        super().__init__(model, ranks, **{"correction": None, **settings})
        groups = [[make_trajectory(f"train/{g}", m, 1) for m in range(3)] for g in range(2)]
        groups[0][0] = replace(groups[0][0], segments=[*groups[0][0].segments, *groups[0][1].segments], num_turns=4)
        if teachers:
            groups[0] = [taught(one, top_k) for one in groups[0]]
        self.batch = self.batch_of(groups)

    def run(self) -> dict[str, Any]:
        return self.train(self.batch)


def test_rows_and_packs_have_the_teacher_of_each_token(tiny_model: str, ranks: Ranks) -> None:
    step = TaughtStep(tiny_model, ranks)
    packs = pack_rows(step.batch.rows, 64) + pack_rows(step.batch.rows, 4096)
    for pack in packs:
        for token, value in zip(pack.token.tolist(), (pack.teacher if pack.teacher is not None else []), strict=False):
            row = next(r for r in step.batch.rows if r.first_token <= token < r.first_token + len(r.targets))
            if row.teacher is None:
                assert value.isnan()
            else:
                assert float(value) == row.teacher[token - row.first_token]
    assert all(pack.teacher is None for pack in pack_rows(step.batch.rows[-3:], 4096))


def test_advantages_by_hand(tiny_model: str, ranks: Ranks) -> None:
    plain = TaughtStep(tiny_model, ranks)
    expected = plain.learner.advantages(plain.batch, plain.learner.score(plain.batch)).tokens
    mixed = TaughtStep(tiny_model, ranks, distill={"in_advantage": 0.5, "reward_weight": 2.0, "clip": 3.0})
    scored = mixed.learner.score(mixed.batch)
    found = mixed.learner.advantages(mixed.batch, scored).tokens
    gap = torch.zeros_like(found)
    for pack in (pack for packs in scored.minibatches for pack in packs):
        if pack.teacher is not None:
            difference = (pack.proximal - pack.teacher).double()
            gap[pack.token] = torch.where(difference.isnan(), 0.0, difference.clamp(-3, 3))
    assert int((gap != 0).sum()) == sum(len(row.targets) for row in mixed.batch.rows if row.teacher is not None)
    assert float(gap.abs().max()) == 3.0
    torch.testing.assert_close(found, 2.0 * expected - 0.5 * gap)


@pytest.mark.parametrize(
    ("correction", "clip"), [(None, 20.0), ("truncated_is", 20.0), ("masked_is", 20.0), (None, 0.5)]
)
@pytest.mark.parametrize("where", ["in_advantage", "in_loss"])
def test_the_gradient_is_that_of_the_reverse_kl(
    where: str, correction: str | None, clip: float, tiny_model: str, ranks: Ranks
) -> None:
    """Alone, both forms move the policy along Σ ρ · d · ∇logπ / N, with d held within ±clip."""
    options, cap = ({"level": "token", "cap": 0.5}, 0.5) if correction == "masked_is" else ({}, 2.0)
    settings = {"correction": correction, "correction_options": options}
    step = TaughtStep(tiny_model, ranks, distill={where: 0.7, "reward_weight": 0.0, "clip": clip}, **settings)
    (pack,) = pack_rows(step.batch.rows, 100000)
    logprobs = step.engine.policy(pack).logprobs
    gap = torch.where(pack.teacher.isnan(), 0.0, logprobs.detach() - pack.teacher).clamp(-clip, clip)
    assert clip == 20.0 or bool((gap.abs() == clip).any())
    ratio = (logprobs.detach() - pack.behaviour).exp() if correction else torch.ones(len(gap))
    if correction:
        ratio = torch.where(ratio > cap, cap if correction == "truncated_is" else 0.0, ratio)
    assert correction != "masked_is" or bool(((ratio == 0) & (gap != 0)).any())
    expected = 0.7 * (ratio * gap * logprobs).sum() / len(logprobs)
    gradients = torch.autograd.grad(expected, list(step.engine.policy.parameters()))
    norm = float(torch.sqrt(sum(one.square().sum() for one in gradients)))
    metrics = step.run()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["teacher_kl"] == pytest.approx(float(gap[~pack.teacher.isnan()].mean()), rel=1e-5)


def test_a_teacher_alone_needs_no_reward(tiny_model: str, ranks: Ranks) -> None:
    found = []
    for reward in (0.0, 1.0):
        step = TaughtStep(tiny_model, ranks, distill={"in_loss": 1.0, **ALONE})
        step.batch = replace(step.batch, trajectories=[replace(t, reward=reward) for t in step.batch.trajectories])
        step.run()
        found.append(step.weights())
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("where", ["in_advantage", "in_loss"])
def test_tokens_without_a_teacher_carry_none(where: str, tiny_model: str, ranks: Ranks) -> None:
    step = TaughtStep(tiny_model, ranks, teachers=False, distill={where: 1.0, **ALONE})
    before = step.weights()
    metrics = step.run()
    assert torch.equal(step.weights(), before)
    assert "teacher_kl" not in metrics


@pytest.mark.parametrize(
    "settings",
    [
        {"distill": {"in_loss": 0.5, "in_advantage": 0.5, "divergence": "jsd"}},
        {"advantage": "prime", "critic": {"lr": 1e-3}},
    ],
    ids=["teacher", "prime"],
)
async def test_a_crash_changes_nothing(tmp_path: Path, tiny_model: str, settings: dict[str, Any]) -> None:
    """The replayed steps have the teacher's numbers of the first time; PRIME's reward model is in the checkpoint."""
    weights = []
    for crashes in (False, True):
        folder = tmp_path / str(crashes)
        folder.mkdir()
        job = make_job(folder, tiny_model, settings)
        job = replace(job, run=replace(job.run, teacher_top_k=(5,) if "distill" in settings else ()))
        queue: Any = job.run.queue
        queue.produce = lambda *names: taught(make_trajectory(*names), top_k=5)
        if crashes:
            await crash(job, "before", "publish_version", 4)
        await train(job)
        weights.append(final_weights(job))
    assert_weights(job, weights[0])
