"""Advantage estimators by hand, and what holds for all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from trainer_support import episodes

from penstock.trainer.advantages import ADVANTAGES, state_groups
from penstock.trainer.advantages.prime import outcome_loss
from penstock.trainer.grouping import best_and_worst, discounted, gae_of

pytestmark = pytest.mark.torch
GROUPED = ("grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus_baseline", "gigpo", "hgpo", "grpo_process", "tree_rl")
LINEAR = ("dr_grpo", "rloo", "opo", "reinforce_plus_plus_baseline", "tree_rl")
WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "turn_gae", "vapo")
SAME_STATE = 7
"""Where every turn answered it, estimators by state compare the whole group."""
UNIT = 0.5 / math.sqrt(1 / 3)
HGPO = [(math.sqrt(2) + 2) / 3, (-math.sqrt(0.5) - 2) / 3]
SHARED = 2 * (1 / 2 - 1 / 3) / math.sqrt(2)
HALVES = {"gamma": 0.5, "lam": 0.5}


def tokens(name: str, rewards: list[float], group: list[int], options: Any = None, **given: Any) -> list[float]:
    return ADVANTAGES.bind(name, options or {})(episodes(rewards, group, **given)).tokens.tolist()


BY_HAND: dict[str, tuple[dict[str, Any], dict[str, Any], list[float], list[float] | None]] = {
    # group 0: mean 0.5, std √0.5; group 7: mean 0.25, std √((0.75² + 3 · 0.25²) / 3) = 0.5
    "grpo": (
        {"rewards": [1.0, 1.0, 0, 0, 0, 0], "group": [0, 7, 0, 7, 7, 7]},
        {},
        [0.70710678, 1.5, -0.70710678, -0.5, -0.5, -0.5],
        None,
    ),
    "dr_grpo": ({"rewards": [1.0, 0.0, 0.5, 2.0], "group": [0, 0, 0, 1]}, {}, [0.5, -0.5, 0.0, 0.0], None),
    # 3 − mean(0, 1.5), 0 − mean(3, 1.5), 1.5 − mean(3, 0); alone: 0
    "rloo": ({"rewards": [3.0, 0.0, 1.5, 9.0], "group": [0, 0, 0, 1]}, {}, [2.25, -2.25, 0.0, 0.0], None),
    # Lengths 1 and 3: the baseline is (1·1 + 3·0) / 4.
    "opo": ({"rewards": [1.0, 0.0], "group": [0, 0], "turns": [[1], [3]]}, {}, [0.75] + [-0.25] * 3, None),
    "reinforce_plus_plus_baseline": ({"rewards": [1.0, 0.0], "group": [0, 0]}, {}, [0.5, -0.5], None),
    # Turn rewards 1, 0 and 0, 1 (the outcome on the last turn): mean 0.5, std √(1/3); later turns are summed.
    "grpo_process": (
        {"rewards": [0.0, 1.0], "group": [0, 0], "turns": [[1, 1], [1, 1]], "turn_rewards": [1.0, 0.0, 0.0, 0.0]},
        {},
        [0.0, -UNIT, 0.0, UNIT],
        None,
    ),
    # γ = 0.5. Returns of turns: (0.5, 1) and (0, 0). Only the first turns share a state.
    "gigpo": (
        {"rewards": [1.0, 0.0], "group": [0, 0], "turns": [[1, 2], [1, 1]], "turn_state": [1, 2, 1, 3]},
        {"gamma": 0.5, "norm": "none", "weight": 2.0},
        [0.5 + 2 * 0.25, 0.5, 0.5, -0.5 - 2 * 0.25, -0.5],
        None,
    ),
    # γ = 1, K = 1; returns of every turn: 1, 0, 0. States: a b | a b | c b.
    # depth 0: state a: {1, 0} → ±1; state b: {1, 0, 0} → mean 1/3, std √2/3 → √2, −1/√2, −1/√2.
    # depth 1: (a, b): {1, 0} → ±1; (c, b) is alone. Weights 1 and 2.
    "hgpo": (
        {"rewards": [1.0, 0.0, 0.0], "group": [0] * 3, "turns": [[1, 1]] * 3, "turn_state": [1, 2, 1, 2, 3, 2]},
        {"gamma": 1.0, "history": 1},
        [1.0, HGPO[0], -1.0, HGPO[1], 0.0, -math.sqrt(0.5)],
        None,
    ),
    # δ: 0 + 0.5·2 − 1 = 0; 0.5 + 0.5·4 − 2 = 0.5; 1 − 4 = −3; 2 − 3 = −1. A: backwards with γλ = 0.25, episodes apart.
    "gae": (
        {
            **{"rewards": [1.0, 2.0], "group": [0, 1], "turns": [[2, 1], [1]]},
            **{"turn_rewards": [0.5, 0.0, 0.0], "values": [1.0, 2.0, 4.0, 3.0]},
        },
        HALVES,
        [0.25 * (0.5 - 0.75), 0.5 - 0.75, -3.0, -1.0],
        [1 - 0.0625, 2 - 0.25, 1.0, 2.0],
    ),
    # Values of turns: 1 and 4. δ: 0.5 + 2 − 1 = 1.5; 1 − 4 = −3. A: 1.5 − 0.75, −3; what the critic learns: A + V.
    "turn_gae": (
        {"rewards": [1.0], "group": [0], "turns": [[2, 1]], "turn_rewards": [0.5, 0.0], "values": [1.0, 9.0, 4.0]},
        HALVES,
        [0.75, 0.75, -3.0],
        [1.75, 1.75, 1.0],
    ),
    # 4 tokens, α = 0.5: λ = 1 − 1/2; 1 token: λ = max(0, 1 − 2) = 0. The critic learns whole returns.
    "vapo": (
        {"rewards": [1.0, 1.0], "group": [0, 0], "turns": [[4], [1]], "values": [0.5, 0.5, 0.5, 0.5, 0.25]},
        {"alpha": 0.5},
        [0.0625, 0.125, 0.25, 0.5, 0.75],
        [1.0] * 5,
    ),
    "reinforce_plus_plus": (
        {
            **{"rewards": [1.0, 3.0], "group": [0, 0], "turns": [[2, 1], [1]]},
            **{"turn_rewards": [2.0, 0.0, 0.0], "token_rewards": [-0.1, 0, 0, 0]},
        },
        {"gamma": 0.5},
        [-0.1 + 0.5 * (2 + 0.5), 2.5, 1.0, 3.0],
        None,
    ),
    "remax": (
        {
            **{"rewards": [1.0, 0.0], "group": [0, 0], "turns": [[1, 1], [1]]},
            **{"turn_rewards": [0.5, 0.0, 0.0], "greedy": [0.25, 0.5]},
        },
        {},
        [1.25, 0.75, -0.5],
        None,
    ),
    # r̄ of the three: 0.2, −0.1, 0.4. Returns 1, 0, 0. The fourth is alone in its group.
    "prime": (
        {
            **{"rewards": [1, 0, 0, 1], "group": [0, 0, 0, 1], "turns": [[2], [1], [2], [1]]},
            "process_rewards": [0.1, 0.3, -0.1, 0.4, 0.4, 9.0],
        },
        {},
        [(0.1 - 0.15) + (0.3 - 0.15) + 1, (0.3 - 0.15) + 1, -0.4 - 0.5, 2 * (0.4 - 0.05) - 0.5, -0.15, 0.0],
        None,
    ),
    # Episodes 0 and 1 share their first turn a, of value 1/2; all returns: mean 1/3.
    "tree_rl": (
        {"rewards": [1.0, 0.0, 0.0], "group": [0] * 3, "turns": [[1, 2], [1, 1], [1]], "turn_path": [1, 2, 1, 3, 4]},
        {},
        [SHARED, 2 / 3 + 1 / 2, 2 / 3 + 1 / 2, SHARED, -1 / 3 - 1 / 2, -2 / 3],
        None,
    ),
    "sppo": (
        {"rewards": [1.0, 0.0, 0.0, 7.0], "group": [0, 0, 0, 1], "turns": [[1], [2], [1], [1]]},
        {},
        [0.5, -0.25, -0.25, -0.25, 0.0],
        None,
    ),
}


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_estimator_by_hand(name: str) -> None:
    batch, options, expected, returns = BY_HAND[name]
    found = ADVANTAGES.bind(name, options)(episodes(**batch))
    assert found.tokens.tolist() == pytest.approx(expected, abs=1e-5)
    assert found.returns is None if returns is None else found.returns.tolist() == pytest.approx(returns)
    assert found.whiten == (name in WHITENED)


def test_vapo_is_gae_where_its_lambda_is() -> None:
    values = {"turns": [[4]], "values": [0.1, 0.7, -0.2, 0.4]}
    assert tokens("vapo", [1.0], [0], {"alpha": 0.5}, **values) == tokens("gae", [1.0], [0], {"lam": 0.5}, **values)


def test_prime_discounts() -> None:
    found = tokens("prime", [0, 0], [0, 0], {"gamma": 0.5}, turns=[[2], [1]], process_rewards=[0.1, 0.3, -0.1])
    assert found == pytest.approx([(0.1 + 0.1) + 0.5 * (0.3 + 0.1), 0.3 + 0.1, -0.1 - 0.2])


def test_sppo_of_two_is_one_half_each_way() -> None:
    assert tokens("sppo", [1.0, 0.0, 2.0, 2.0], [0, 0, 1, 1]) == [0.5, -0.5, 0.0, 0.0]
    assert tokens("sppo", [0.7 + 0.2 + 0.1, 1.0], [0, 0]) == [0.0, 0.0]


def test_turn_rewards_are_part_of_the_return() -> None:
    found = tokens("dr_grpo", [1.0, 1.0], [0, 0], turns=[[1, 1], [1]], turn_rewards=[0.5, 0.5, 0.0])
    assert found == pytest.approx([0.5, 0.5, -0.5])


def test_the_outcome_loss_of_prime_by_hand() -> None:
    found = outcome_loss(torch.tensor([0.5, -1.0]), torch.tensor([1.5, 0.0]), torch.tensor([1.0, 0.25]))
    first = -torch.sigmoid(torch.tensor(2.0)).log()
    second = -(0.25 * torch.sigmoid(torch.tensor(-1.0)).log() + 0.75 * torch.sigmoid(torch.tensor(1.0)).log())
    torch.testing.assert_close(found, torch.stack([first, second]))


def test_best_and_worst_are_partners() -> None:
    """The first of equals; not those that are not eligible, nor a group of equals, nor one without a member."""
    values = torch.tensor([9.0, 1.0, 3.0, 3.0, 1.0, 5.0, 5.0, 7.0])
    eligible = torch.tensor([False, *[True] * 6, False])
    partner, side = best_and_worst(values, torch.tensor([4, 4, 4, 4, 4, 6, 6, 8]), eligible)
    assert partner.tolist() == [0, 2, 1, 3, 4, 5, 6, 7]
    assert side.tolist() == [0, -1, 1, 0, 0, 0, 0, 0]


def test_equal_states_of_other_groups_are_not_compared() -> None:
    assert tokens("gigpo", [1.0, 0.0, 5.0, 5.0], [0, 0, 1, 1], turn_state=[SAME_STATE] * 4)[2:] == [0.0, 0.0]


@pytest.mark.parametrize("name", GROUPED)
def test_equal_rewards_say_nothing(name: str) -> None:
    assert tokens(name, [0.1] * 10 + [3.0], [0] * 10 + [1], turn_state=[SAME_STATE] * 11) == [0.0] * 11


@pytest.mark.parametrize(
    ("name", "deviation"),
    [("grpo", math.sqrt(2)), ("gigpo", math.sqrt(2)), ("grpo_process", math.sqrt(2)), ("hgpo", 1)],
)
def test_epsilon_is_added_to_the_deviation(name: str, deviation: float) -> None:
    """Rewards that differ by hardly more than ε = 1e-6 say little."""
    expected = (2 if name == "gigpo" else 1) / (deviation + 1)
    found = tokens(name, [0.0, 2e-6], [0, 0], turn_state=[SAME_STATE] * 2)
    assert found == pytest.approx([-expected, expected], rel=1e-6)


def test_state_groups_need_the_whole_history() -> None:
    """A turn with fewer turns before it is alone, also where its number is another turn's state."""
    batch = episodes([0.0, 0.0], [0, 0], turns=[[1, 1], [1, 1]], turn_state=[0, 0, 9, 0])
    once, twice = (state_groups(batch, depth).tolist() for depth in (1, 2))
    assert [[one == other for other in once] for one in once] == [
        *[[True, True, False, True]] * 2,
        [False, False, True, False],
        [True, True, False, True],
    ]
    assert len(set(twice)) == 4


def test_an_episode_without_a_token_takes_no_others_reward() -> None:
    batch = episodes([1.0, 5.0, 2.0], [0, 0, 0], turns=[[1], [0], [1]])
    assert batch.rewards_by_token().tolist() == [1.0, 2.0]
    assert batch.returns.tolist() == [1.0, 5.0, 2.0]


NUMBERS = st.floats(-3, 3, width=32)
REWARDS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=4, max_size=9)


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


@settings(max_examples=25)
@given(REWARDS, st.randoms(use_true_random=False))
@pytest.mark.parametrize("name", GROUPED)
def test_the_order_of_episodes_does_not_matter(name: str, rewards: list[float], random: Any) -> None:
    group, states = [index % 3 for index in range(len(rewards))], [SAME_STATE] * len(rewards)
    order = list(range(len(rewards)))
    random.shuffle(order)
    before = tokens(name, rewards, group, turn_state=states)
    after = tokens(name, [rewards[i] for i in order], [group[i] for i in order], turn_state=states)
    assert after == pytest.approx([before[i] for i in order], abs=1e-12)


@settings(max_examples=25)
@given(REWARDS, st.floats(0.5, 50), st.floats(-5, 5))
@pytest.mark.parametrize("name", GROUPED)
def test_a_shift_does_not_matter_and_a_scale_scales_or_does_not(
    name: str, rewards: list[float], scale: float, shift: float
) -> None:
    group, states = [index % 2 for index in range(len(rewards))], [SAME_STATE] * len(rewards)
    before = torch.tensor(tokens(name, rewards, group, turn_state=states))
    changed = torch.tensor(tokens(name, [scale * r + shift for r in rewards], group, turn_state=states))
    # float32 here; the estimators' ε = 1e-6 shows where rewards are scaled.
    torch.testing.assert_close(changed, before * (scale if name in LINEAR else 1.0), atol=1e-4, rtol=1e-4)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.integers(0, 3)), min_size=2, max_size=12))
@pytest.mark.parametrize("name", GROUPED)
def test_a_group_is_alone_in_the_world(name: str, members: list[tuple[float, int]]) -> None:
    rewards, group = [reward for reward, _ in members], [number for _, number in members]
    together = tokens(name, rewards, group, turn_state=[SAME_STATE] * len(rewards))
    for number in set(group):
        mine = [index for index, other in enumerate(group) if other == number]
        alone = tokens(name, [rewards[i] for i in mine], [0] * len(mine), turn_state=[SAME_STATE] * len(mine))
        assert [together[i] for i in mine] == pytest.approx(alone, abs=1e-12)
