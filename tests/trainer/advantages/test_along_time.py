"""Estimators that look along an episode's time: GAE and its kin, REINFORCE++, ReMax, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from trainer_support import episodes

from penstock.trainer.advantages import ADVANTAGES
from penstock.trainer.grouping import discounted, gae_of

pytestmark = pytest.mark.torch


def test_gae_by_hand() -> None:
    batch = episodes([1.0, 2.0], [0, 1], turns=[[2, 1], [1]], turn_rewards=[0.5, 0.0, 0.0], values=[1.0, 2.0, 4.0, 3.0])
    found = ADVANTAGES.bind("gae", {"gamma": 0.5, "lam": 0.5})(batch)
    # δ: 0 + 0.5·2 − 1 = 0; 0.5 + 0.5·4 − 2 = 0.5; 1 − 4 = −3; 2 − 3 = −1. A: backwards with γλ = 0.25, episodes apart.
    assert found.tokens.tolist() == pytest.approx([0.25 * (0.5 - 0.75), 0.5 - 0.75, -3.0, -1.0])
    assert found.returns.tolist() == pytest.approx([1 - 0.0625, 2 - 0.25, 1.0, 2.0])
    assert found.whiten


def test_turn_gae_by_hand() -> None:
    batch = episodes([1.0], [0], turns=[[2, 1]], turn_rewards=[0.5, 0.0], values=[1.0, 9.0, 4.0])
    found = ADVANTAGES.bind("turn_gae", {"gamma": 0.5, "lam": 0.5})(batch)
    # Values of turns: 1 and 4. δ: 0.5 + 2 − 1 = 1.5; 1 − 4 = −3. A: 1.5 − 0.75, −3; what the critic learns: A + V.
    assert found.tokens.tolist() == pytest.approx([0.75, 0.75, -3.0])
    assert found.returns.tolist() == pytest.approx([1.75, 1.75, 1.0])


def test_vapo_by_hand() -> None:
    # 4 tokens, α = 0.5: λ = 1 − 1/2; 1 token: λ = max(0, 1 − 2) = 0. The critic learns whole returns.
    batch = episodes([1.0, 1.0], [0, 0], turns=[[4], [1]], values=[0.5, 0.5, 0.5, 0.5, 0.25])
    found = ADVANTAGES.bind("vapo", {"alpha": 0.5})(batch)
    assert found.tokens.tolist() == pytest.approx([0.0625, 0.125, 0.25, 0.5, 0.75])
    assert found.returns.tolist() == pytest.approx([1.0] * 5)


def test_vapo_is_gae_where_its_lambda_is() -> None:
    batch = episodes([1.0], [0], turns=[[4]], values=[0.1, 0.7, -0.2, 0.4])
    gae = ADVANTAGES.bind("gae", {"lam": 0.5})(batch)
    torch.testing.assert_close(ADVANTAGES.bind("vapo", {"alpha": 0.5})(batch).tokens, gae.tokens)


def test_reinforce_plus_plus_by_hand() -> None:
    batch = episodes(
        [1.0, 3.0], [0, 0], turns=[[2, 1], [1]], turn_rewards=[2.0, 0.0, 0.0], token_rewards=[-0.1, 0, 0, 0]
    )
    found = ADVANTAGES.bind("reinforce_plus_plus", {"gamma": 0.5})(batch)
    assert found.tokens.tolist() == pytest.approx([-0.1 + 0.5 * (2 + 0.5), 2.5, 1.0, 3.0])
    assert found.whiten


def test_remax_by_hand() -> None:
    batch = episodes([1.0, 0.0], [0, 0], turns=[[1, 1], [1]], turn_rewards=[0.5, 0.0, 0.0], greedy=[0.25, 0.5])
    assert ADVANTAGES.get("remax")(batch).tokens.tolist() == pytest.approx([1.25, 0.75, -0.5])


NUMBERS = st.floats(-3, 3, width=32)


@settings(max_examples=40)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=12), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_its_sum_of_deltas(steps: list[tuple[float, float]], gamma: float, lam: float) -> None:
    rewards, values = (torch.tensor(column, dtype=torch.float64) for column in zip(*steps, strict=True))
    found = gae_of(rewards, values, torch.zeros(len(steps), dtype=torch.long), gamma, lam)
    following = torch.cat([values[1:], torch.zeros(1, dtype=torch.float64)])
    deltas = rewards + gamma * following - values
    for start in range(len(steps)):
        powers = (gamma * lam) ** torch.arange(len(steps) - start, dtype=torch.float64)
        assert float(found[start]) == pytest.approx(float((powers * deltas[start:]).sum()), abs=1e-9)


@settings(max_examples=40)
@given(st.lists(st.lists(NUMBERS, min_size=1, max_size=5), min_size=1, max_size=4), st.floats(0, 1))
def test_episodes_do_not_see_each_other(rewards: list[list[float]], gamma: float) -> None:
    flat = torch.tensor([r for episode in rewards for r in episode], dtype=torch.float64)
    index = torch.tensor([number for number, episode in enumerate(rewards) for _ in episode])
    alone = [
        discounted(torch.tensor(episode, dtype=torch.float64), torch.zeros(len(episode), dtype=torch.long), gamma)
        for episode in rewards
    ]
    assert torch.equal(discounted(flat, index, gamma), torch.cat(alone))


def test_an_episode_without_a_token_takes_no_others_reward() -> None:
    batch = episodes([1.0, 5.0, 2.0], [0, 0, 0], turns=[[1], [0], [1]])
    assert batch.rewards_by_token().tolist() == [1.0, 2.0]
    assert batch.returns.tolist() == [1.0, 5.0, 2.0]
