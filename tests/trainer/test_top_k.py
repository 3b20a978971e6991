"""A teacher's likeliest ids in the step: rows, packs, divergences by hand and over a vocabulary, what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from test_distillation import ALONE, TaughtStep
from torch import Tensor
from trainer_support import VOCAB, make_segment, taught, with_tops

from penstock.trainer import ModelLimits, Ranks, TrainerConfig, make_row, pack_rows
from penstock.trainer.distillation import LEAST_REST, coarse_divergence, teacher_coarse
from penstock.trainer.logprobs import coarse_logprobs

pytestmark = pytest.mark.torch
KINDS = ["reverse_kl", "forward_kl", "jsd"]
BETA = 0.3


def divergence(kind: str, student: Tensor, teacher: Tensor) -> Tensor:
    """By definition, of probabilities [n, buckets]."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum(-1)

    mixture = BETA * teacher + (1 - BETA) * student
    return {
        "reverse_kl": kl(student, teacher),
        "forward_kl": kl(teacher, student),
        "jsd": BETA * kl(teacher, mixture) + (1 - BETA) * kl(student, mixture),
    }[kind]


def config_of(kind: str) -> Any:
    return TrainerConfig(distill={"divergence": kind, "jsd_beta": BETA}).distill


def buckets(probabilities: Tensor, ids: Tensor) -> Tensor:
    """[n, V], [n, k] → [n, k + 1] of the ids, then of all others."""
    of_ids = probabilities.gather(-1, ids)
    return torch.cat([of_ids, 1 - of_ids.sum(-1, keepdim=True)], 1)


def random_pair(tokens: int, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits of a policy and logprobs of a teacher, float64 [tokens, 20]."""
    torch.manual_seed(tokens)
    return scale * torch.randn(tokens, 20).double(), (scale * torch.randn(tokens, 20)).double().log_softmax(-1)


# the divergence ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("reverse_kl", 0.2 * math.log(0.4) + 0.5 * math.log(5 / 3) + 0.3 * math.log(1.5)),
        ("forward_kl", 0.5 * math.log(2.5) + 0.3 * math.log(0.6) + 0.2 * math.log(2 / 3)),
    ],
)
def test_divergence_worked_by_hand(kind: str, expected: float) -> None:
    """The teacher's likeliest are ids 7 and 3 with 0.5 and 0.3; the policy holds them for 0.2 and 0.5 likely."""
    teacher = teacher_coarse(torch.tensor([[7, 3]]), torch.tensor([[0.5, 0.3]]).log())
    student = torch.tensor([[0.2, 0.5, 0.3]]).log()
    assert float(coarse_divergence(student, teacher, config_of(kind))) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_divergence_of_a_whole_vocabulary_is_the_full_one(kind: str) -> None:
    logits, teacher = random_pair(9)
    ids = torch.stack([torch.randperm(20) for _ in range(9)])
    student = coarse_logprobs(logits, ids, 1.0)
    assert (student[:, -1] == -math.inf).all(), "there are no other ids"
    found = coarse_divergence(student, teacher_coarse(ids, teacher.gather(-1, ids).float()), config_of(kind))
    torch.testing.assert_close(
        found.double(), divergence(kind, logits.softmax(-1), teacher.exp()), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("kind", KINDS)
def test_divergence_is_between_zero_and_the_full_one(kind: str) -> None:
    """And grows with k: each bucket more is a finer look at the same two distributions. A rest of 1e-5, one less a sum
    of float32 numbers, has two digits."""
    logits, teacher = random_pair(200, scale=3.0)
    full = divergence(kind, logits.softmax(-1), teacher.exp())
    below = torch.zeros(200, dtype=torch.float64)
    for k in (1, 2, 5, 12, 19):
        ids = teacher.topk(k).indices
        found = coarse_divergence(
            coarse_logprobs(logits, ids, 1.0), teacher_coarse(ids, teacher.gather(-1, ids).float()), config_of(kind)
        ).double()
        expected = divergence(kind, buckets(logits.softmax(-1), ids), buckets(teacher.exp(), ids))
        has_rest = buckets(teacher.exp(), ids)[:, -1] > 10 * LEAST_REST
        torch.testing.assert_close(found[has_rest], expected[has_rest], atol=1e-5, rtol=1e-3)
        assert (found >= 0.99 * below - 1e-5).all()
        assert (found <= 1.01 * full + 1e-5).all()
        below = found


@pytest.mark.parametrize("kind", KINDS)
def test_divergence_of_equal_distributions_has_no_slope(kind: str) -> None:
    logits, _ = random_pair(5)
    logits = logits.float().requires_grad_()
    ids = torch.stack([torch.randperm(20)[:4] for _ in range(5)])
    teacher = teacher_coarse(ids, logits.detach().log_softmax(-1).gather(-1, ids))
    found = coarse_divergence(coarse_logprobs(logits, ids, 1.0), teacher, config_of(kind))
    assert float(found.detach().abs().max()) < 1e-6
    (slope,) = torch.autograd.grad(found.sum(), logits)
    assert float(slope.abs().max()) < 1e-5


def test_a_teacher_that_is_sure_rounds_to_no_rest() -> None:
    """float32 logprobs of a few ids may sum to more than 1."""
    sure = teacher_coarse(torch.tensor([[4, 5]]), torch.tensor([[0.0, math.log(1e-7)]]))
    assert float(sure[0, -1]) == pytest.approx(math.log(LEAST_REST))
    found = coarse_divergence(torch.tensor([[0.5, 0.2, 0.3]]).log(), sure, config_of("reverse_kl"))
    assert 0 < float(found) < 0.3 * -math.log(LEAST_REST) + 0.2 * -math.log(1e-7)


# rows and packs ------------------------------------------------------------------------------------------------------
LIMITS = ModelLimits(context=256, vocab=VOCAB)


def row_of(number: int, top_k: int, vocab: int = VOCAB) -> Any:
    rng = np.random.default_rng(number)
    segment = make_segment(rng, 0)
    segment = with_tops(segment, rng, top_k) if top_k else segment
    return make_row(number, segment, "", step=0, bound=0, model=replace(LIMITS, vocab=vocab)), segment


def test_packs_have_the_likeliest_ids_of_each_token() -> None:
    """Of teachers that give 3, 0 and 5."""
    rows, segments = zip(*(row_of(number, k) for number, k in enumerate([3, 0, 5])), strict=True)
    (pack,) = pack_rows(rows, 4096)
    assert pack.top_ids.dtype == torch.int32
    for n, number in enumerate(pack.episode.tolist()):
        place = int((pack.episode[:n] == number).sum())
        ids = segments[number].teacher_top_ids
        given = [] if ids is None else ids[place].tolist()
        assert pack.top_ids[n].tolist() == given + [-1] * (5 - len(given))
        values = [] if ids is None else segments[number].teacher_top_logprobs[place].tolist()
        assert pack.top_logprobs[n].tolist() == values + [0.0] * (5 - len(given))
    (plain,) = pack_rows(rows[1:2], 4096)
    assert plain.top_ids is None
    assert pack.without_tops.top_ids is None


def test_ids_that_the_model_lacks_count_to_the_rest() -> None:
    """A teacher's matrices may be filled up to more rows than the model's."""
    row, segment = row_of(1, 6, vocab=VOCAB)
    foreign = replace(
        segment, teacher_top_ids=np.where(segment.teacher_top_ids % 3 == 0, 1000, segment.teacher_top_ids)
    )
    changed = make_row(1, foreign, "", step=0, bound=0, model=LIMITS)
    assert (changed.top_logprobs[changed.top_ids == -1] == 0).all()
    first_beyond = replace(foreign, teacher_top_ids=np.minimum(foreign.teacher_top_ids, VOCAB))
    assert (make_row(1, first_beyond, "", step=0, bound=0, model=LIMITS).top_ids == changed.top_ids).all()
    assert ((changed.top_ids == -1) == (row.top_ids % 3 == 0)).all()
    coarse = teacher_coarse(torch.from_numpy(changed.top_ids), torch.from_numpy(changed.top_logprobs)).exp()
    kept = np.where(row.top_ids % 3 == 0, 0.0, np.exp(row.top_logprobs.astype(np.float64))).sum(-1)
    np.testing.assert_allclose(coarse[:, -1].numpy(), 1 - kept, atol=1e-6)
    assert coarse[:, :-1].masked_select(torch.from_numpy(changed.top_ids == -1)).abs().sum() == 0


# the step ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("correction", [None, "truncated_is"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_the_divergence(
    kind: str, correction: str | None, tiny_model: str, ranks: Ranks
) -> None:
    """From the logits of the plain model, row by row. A correction's weights are those of sampled tokens, not of it."""
    distill = {"in_loss": 0.7, "divergence": kind, "jsd_beta": BETA, **ALONE}
    step = TaughtStep(tiny_model, ranks, top_k=6, distill=distill, correction=correction)
    model = plain_model(tiny_model)
    total, masses, divergences = torch.zeros(()), [], []
    for row in step.batch.rows:
        if row.top_ids is None:
            continue
        logits = model(torch.from_numpy(row.ids)[None]).logits[0, torch.from_numpy(row.targets) - 1]
        ids, values = torch.from_numpy(row.top_ids).long(), torch.from_numpy(row.top_logprobs).exp()
        teacher = torch.cat([values, 1 - values.sum(-1, keepdim=True)], 1)
        found = divergence(kind, buckets(logits.softmax(-1), ids), teacher)
        total = total + 0.7 * found.sum()
        masses += values.sum(-1).tolist()
        divergences += found.tolist()
    tokens = sum(len(row.targets) for row in step.batch.rows)
    gradients = torch.autograd.grad(total / tokens, list(model.parameters()))
    norm = float(torch.sqrt(sum(one.square().sum() for one in gradients)))
    metrics = step.run()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["teacher_divergence"] == pytest.approx(np.mean(divergences), rel=1e-4)
    assert metrics["teacher_top_mass"] == pytest.approx(np.mean(masses), rel=1e-5)
    assert 0 < metrics["student_top_mass"] < 1


def plain_model(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_rows_without_likeliest_ids_learn_from_sampled_tokens(tiny_model: str, ranks: Ranks) -> None:
    """Of two teachers one gives them: each token learns in its own way, in one pack."""
    step = TaughtStep(tiny_model, ranks, top_k=0, distill={"in_loss": 0.7, **ALONE})
    first = step.batch.trajectories[0]
    trajectories = [taught(first, 4), *step.batch.trajectories[1:]]
    rows = [
        make_row(row.episode, segment, "", step=1, bound=2, model=step.engine.limits)
        for row, segment in zip(step.batch.rows, [s for t in trajectories for s in t.segments], strict=True)
    ]
    rows = [replace(row, first_token=old.first_token) for row, old in zip(rows, step.batch.rows, strict=True)]
    step.batch = replace(step.batch, trajectories=trajectories, rows=rows)
    (pack,) = pack_rows(rows, 100000)
    outputs = step.engine.policy(pack)
    has_top = (pack.top_ids >= 0).any(-1)
    gap = torch.where(pack.teacher.isnan(), 0.0, outputs.logprobs.detach() - pack.teacher).clamp(-20, 20)
    teacher = teacher_coarse(pack.top_ids, pack.top_logprobs)
    computed = coarse_divergence(outputs.coarse, teacher, step.engine.config.distill)
    total = torch.where(has_top, computed, gap * outputs.logprobs).sum() * 0.7 / len(gap)
    gradients = torch.autograd.grad(total, list(step.engine.policy.parameters()))
    norm = float(torch.sqrt(sum(one.square().sum() for one in gradients)))
    assert 0 < int(has_top.sum()) < len(has_top)
    assert step.run()["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_scoring_computes_no_other_ids(tiny_model: str, ranks: Ranks) -> None:
    """Advantages need the sampled token alone."""
    step = TaughtStep(tiny_model, ranks, top_k=8, distill={"in_loss": 1.0, "in_advantage": 1.0})
    seen: list[bool] = []
    step.engine.policy.register_forward_pre_hook(lambda module, given: seen.append(given[0].top_ids is not None))
    scored = step.learner.score(step.batch)
    assert seen
    assert not any(seen)
    assert any(pack.top_ids is not None for packs in scored.minibatches for pack in packs)
