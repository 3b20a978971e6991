"""The loss of one pack by hand: what is left out, what is added, what is measured, and which tokens a loss chooses."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor

from penstock.trainer import ModelLimits, Pack, Ranks, TrainerConfig, make_row
from penstock.trainer.distillation import coarse_divergence, teacher_coarse
from penstock.trainer.logprobs import Outputs
from penstock.trainer.loss import Objective, Targets, select_tokens
from penstock.trainer.metrics import MetricAccumulator, Totals
from penstock.trainer.packing import join_rows
from penstock.transfer_queue import Segment

pytestmark = pytest.mark.torch
RATIOS = [9.0, 1.25, 0.5, 4.0, 1.5, 8.0]
"""Of each token, π / π_behave. The first token is too old to be trained on, those of 4 and 8 are over the cap."""
LOGS = [math.log(ratio) for ratio in RATIOS]
ADVANTAGES = [9.0, 1.0, -2.0, 0.5, 3.0, 7.0]
MASKED: dict[str, Any] = {"correction": "masked_is", "correction_options": {"level": "token", "cap": 2.0}}


def pack_of(**changes: Any) -> Pack:
    """Six tokens of three turns, two versions old, one version old, and fresh; the engine's logprobs are all −2."""
    segment = Segment(
        prompt_ids=np.array([1, 2], dtype=np.int32),
        response_ids=np.arange(3, 9, dtype=np.int32),
        response_mask=np.ones(6, dtype=np.uint8),
        response_logprobs=np.full(6, -2.0, dtype=np.float32),
        version_spans=np.array([[1, 0, 1], [2, 1, 2], [3, 2, 6]], dtype=np.int32),
        turn_starts=np.array([0, 1, 2], dtype=np.int32),
    )
    row = make_row(0, segment, "", step=3, bound=1, model=ModelLimits(context=16, vocab=64))
    return replace(join_rows([row]), **changes)


def objective(
    pack: Pack, ranks: Ranks, *, outputs: dict[str, Tensor | None] | None = None, **settings: Any
) -> tuple[float, list[float], Totals]:
    """(loss, its gradient by token, what was measured); each token counts half."""
    logprobs = (torch.full((6,), -2.0) + torch.tensor(LOGS)).requires_grad_()
    chosen, advantages = settings.pop("chosen", None), settings.pop("advantages", ADVANTAGES)
    targets = Targets(torch.tensor(advantages), torch.tensor([0.5], dtype=torch.float64), chosen)
    tally = MetricAccumulator()
    loss = Objective(TrainerConfig(**settings), targets, tally)(
        pack, Outputs(logprobs, **{"entropy": None, **(outputs or {})})
    )
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), logprobs.grad.tolist(), tally.reduce(ranks)


def test_objective_leaves_out_what_is_rejected(ranks: Ranks) -> None:
    loss, slopes, _ = objective(pack_of(), ranks, **MASKED)
    # −w·A of tokens 1, 2 and 4.
    assert loss == pytest.approx(0.5 * (-1.25 * 1 + 0.5 * 2 - 1.5 * 3))
    assert slopes == pytest.approx([0.0, -0.625, 0.5, 0.0, -2.25, 0.0])


def test_objective_measures_trained_tokens(ranks: Ranks) -> None:
    _, _, found = objective(pack_of(), ranks, **MASKED)
    trained = RATIOS[1:]
    expected = {
        "logprob_abs_diff": np.mean(np.abs(LOGS[2:])),
        "logprob_abs_diff_all": np.mean(np.abs(LOGS[1:])),
        "kl_k3": np.mean([ratio - 1 - math.log(ratio) for ratio in trained]),
        "is_ratio": np.mean(trained),
        "is_ratio_squared": np.mean(np.square(trained)),
        "is_weight": (1.25 + 0.5 + 1.5) / 5,
        "staleness": 1 / 5,
        "policy/kl_proximal": 0.0,
        "policy/loss": (-1.25 * 1 + 0.5 * 2 - 1.5 * 3) / 5,
        "policy/tokens_rejected_share": 2 / 5,
        "policy/clip_fraction_low": 0.0,
        "policy/clip_fraction_high": 0.0,
    }
    assert {name: found.mean(name) for name in expected} == pytest.approx(expected, rel=1e-5)


def test_objective_measures_against_the_start_of_the_step(ranks: Ranks) -> None:
    """The policy has moved since: the mismatch with the engine is that of the start, which `proximal` holds."""
    loss, _, found = objective(pack_of(proximal=torch.full((6,), -2.0)), ranks, **MASKED)
    # Clipped at 1.28 where A > 0: 1.25·1, 0.5·−2 held to 0.8·−2, 1.28·0.5, 1.28·3, 1.28·7.
    assert loss == pytest.approx(0.5 * (-1.25 + 1.6 - 0.64 - 3.84 - 8.96), rel=1e-5)
    assert found.mean("is_ratio") == found.mean("is_weight") == 1.0
    assert found.mean("kl_k3") == found.mean("policy/tokens_rejected_share") == 0.0
    assert found.mean("policy/kl_proximal") == pytest.approx(-np.mean(LOGS[1:]), rel=1e-5)


def test_objective_adds_the_reference_and_takes_the_entropy(ranks: Ranks) -> None:
    entropy = torch.arange(6.0)
    pack = pack_of(reference=torch.full((6,), -2.0))
    settings = {"kl": {"in_loss": 0.5, "estimator": "k2"}, "entropy_bonus": 0.1, "correction": None}
    loss, slopes, found = objective(pack, ranks, outputs={"entropy": entropy}, advantages=[0.0] * 6, **settings)
    kl = [log**2 / 2 for log in LOGS[1:]]
    assert loss == pytest.approx(0.5 * (0.5 * sum(kl) - 0.1 * (1 + 2 + 3 + 4 + 5)), rel=1e-5)
    assert slopes == pytest.approx([0.0, *(0.25 * log for log in LOGS[1:])], rel=1e-5)
    assert found.mean("policy/kl_reference") == pytest.approx(np.mean(kl), rel=1e-5)
    assert found.mean("policy/entropy") == 3.0


def test_objective_without_the_reference_in_the_loss_has_nothing_of_it(ranks: Ranks) -> None:
    settings: dict[str, Any] = {**MASKED, "kl": {"in_reward": 0.1}}
    expected, slopes, _ = objective(pack_of(), ranks, **settings)
    # k3 of −102 is beyond float32.
    assert objective(pack_of(reference=torch.full((6,), 100.0)), ranks, **settings)[:2] == (expected, slopes)


def test_objective_takes_the_teacher_of_each_token(ranks: Ranks) -> None:
    """Tokens 1 and 4 have the teacher's likeliest ids, 2 has its own alone; 3 and 5 are rejected, with and without."""
    ids = torch.tensor([[1, 2], [0, -1], [-1, -1], [3, 4], [5, 6], [-1, -1]], dtype=torch.int32)
    given = torch.tensor([[0.5, 0.2]] * 6).log().masked_fill(ids < 0, 0.0)
    student = torch.tensor([[0.3, 0.3, 0.4]] * 6).log()
    student[1, 1] = -math.inf
    pack = pack_of(teacher=torch.full((6,), -2.0), top_ids=ids, top_logprobs=given)
    settings = {"distill": {"in_loss": 0.7}, "advantages": [0.0] * 6, **MASKED}
    loss, _, found = objective(pack, ranks, outputs={"coarse": student}, **settings)
    by_token = coarse_divergence(student, teacher_coarse(ids, given), TrainerConfig().distill).tolist()
    assert loss == pytest.approx(0.5 * 0.7 * (by_token[1] + 0.5 * LOGS[2] ** 2 / 2 + by_token[4]), rel=1e-5)
    assert found.mean("policy/teacher_kl") == pytest.approx(np.mean(LOGS[1:]), rel=1e-5)
    assert found.mean("policy/teacher_divergence") == pytest.approx(np.mean([by_token[n] for n in (1, 3, 4)]), rel=1e-5)
    assert found.mean("policy/teacher_top_mass") == pytest.approx((0.5 + 0.7 + 0.7) / 3, rel=1e-5)
    assert found.mean("policy/student_top_mass") == pytest.approx((0.3 + 0.6 + 0.6) / 3, rel=1e-5)


def test_objective_hands_the_choice_on(ranks: Ranks) -> None:
    pack = pack_of(proximal=torch.full((6,), -2.0))
    chosen = torch.tensor([True, False, False, False, True, False])
    loss, _, _ = objective(pack, ranks, chosen=chosen, loss="kl_cov", correction=None)
    plain = [-ratio * advantage for ratio, advantage in zip(RATIOS[1:], ADVANTAGES[1:], strict=True)]
    assert loss == pytest.approx(0.5 * (sum(plain) + math.log(1.5)), rel=1e-5)


def test_objective_of_no_trained_token_is_nothing(ranks: Ranks) -> None:
    """It still has a gradient: the other ranks' backward waits for this one's."""
    loss, slopes, _ = objective(pack_of(mask=torch.zeros(6, dtype=torch.bool)), ranks)
    assert (loss, slopes) == (0.0, [0.0] * 6)


GROUP = torch.zeros(6, dtype=torch.int64)


def test_tokens_are_chosen_among_the_trained_ones(ranks: Ranks) -> None:
    """By their covariance at the start of the step, and by the loss's own settings."""
    pack = pack_of(proximal=torch.tensor([-9.0, -2.0, -2.0, -2.0, -0.5, -2.0]))
    advantages = torch.tensor([-50.0, 1.0, -2.0, 0.5, 3.0, 0.0], dtype=torch.float64)
    # Distances from the means 0.5 and −1.7 multiplied: −0.15, 0.75, 0, 3, 0.15.
    for share, expected in ((0.2, [4]), (0.4, [2, 4]), (0.6, [2, 4, 5])):
        config = TrainerConfig(loss="kl_cov", loss_options={"share": share})
        found = select_tokens(config, [pack], advantages, GROUP, step=3, ranks=ranks)
        assert found is not None
        assert found.nonzero().flatten().tolist() == expected
    found = select_tokens(TrainerConfig(loss="kl_cov"), [pack], advantages, GROUP, step=3, ranks=ranks)
    assert found is not None
    assert found.nonzero().flatten().tolist() == [4], "one at least"
    assert select_tokens(TrainerConfig(), [pack], advantages, GROUP, step=3, ranks=ranks) is None


class ExchangingThread:
    """A rank of two, each in a thread."""

    def __init__(self, rank: int, parts: dict[int, Tensor], both: threading.Barrier) -> None:
        self.rank, self._parts, self._both = rank, parts, both

    def gather_numbers(self, mine: Tensor) -> list[Tensor]:
        self._parts[self.rank] = mine
        self._both.wait(60)
        return [self._parts[0], self._parts[1]]


@pytest.mark.parametrize(
    ("loss", "options"), [("clip_cov", {"share": 0.4, "lower": -9.0, "upper": 9.0}), ("kl_cov", {"share": 0.25})]
)
def test_the_same_tokens_are_chosen_on_two_ranks(loss: str, options: dict[str, Any], ranks: Ranks) -> None:
    """Groups are dealt to ranks in turn. In kl_cov two tokens of two groups are equal; the places that clip_cov draws
    in step 3 are not the same in groups 1 and 2, which change places."""
    config = TrainerConfig(loss=loss, loss_options=options)
    numbers = torch.tensor([[0.1, 2.0, -1.0], [0.5, 2.0, -0.5], [2.0, -1.0, 0.3], [1.5, 0.7, 0.9]])

    def chosen_on(rank: Any, groups: list[int]) -> dict[int, list[bool]]:
        packs = [
            pack_of(
                mask=torch.ones(6, dtype=torch.bool),
                token=torch.arange(6) + 3 * first,
                episode=torch.arange(2).repeat_interleave(3) + first,
                proximal=numbers[groups[first : first + 2]].flatten(),
            )
            for first in range(0, len(groups), 2)
        ]
        advantages = numbers[groups].flatten().double()
        chosen = select_tokens(config, packs, advantages, torch.tensor(groups), step=3, ranks=rank)
        assert chosen is not None
        return dict(zip(groups, chosen.view(-1, 3).tolist(), strict=True))

    both, parts = threading.Barrier(2), dict[int, Tensor]()
    with ThreadPoolExecutor(2) as pool:
        shares = pool.map(chosen_on, [ExchangingThread(rank, parts, both) for rank in (0, 1)], [[0, 2], [1, 3]])
        on_two = {group: found for share in shares for group, found in share.items()}
    assert on_two == chosen_on(ranks, [0, 1, 2, 3])
