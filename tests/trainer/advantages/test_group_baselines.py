"""Estimators whose baseline is the group, by hand; and what holds for all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from trainer_support import episodes

from penstock.trainer.advantages import ADVANTAGES, state_groups

pytestmark = pytest.mark.torch
GROUPED = ("grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus_baseline", "gigpo", "hgpo", "grpo_process")
LINEAR = ("dr_grpo", "rloo", "opo", "reinforce_plus_plus_baseline")
SCALE_FREE = ("grpo", "gigpo", "hgpo", "grpo_process")
# Every turn answered the same state, so that estimators by state compare the whole group.
SAME_STATE = 7


def tokens(name: str, rewards: list[float], group: list[int], **given: Any) -> list[float]:
    options = given.pop("options", {})
    return ADVANTAGES.bind(name, options)(episodes(rewards, group, **given)).tokens.tolist()


def test_dr_grpo_by_hand() -> None:
    assert tokens("dr_grpo", [1.0, 0.0, 0.5, 2.0], [0, 0, 0, 1]) == pytest.approx([0.5, -0.5, 0.0, 0.0])


def test_rloo_by_hand() -> None:
    # 3 − mean(0, 1.5), 0 − mean(3, 1.5), 1.5 − mean(3, 0); alone: 0
    assert tokens("rloo", [3.0, 0.0, 1.5, 9.0], [0, 0, 0, 1]) == pytest.approx([2.25, -2.25, 0.0, 0.0])


def test_opo_by_hand() -> None:
    # Lengths 1 and 3: the baseline is (1·1 + 3·0) / 4
    assert tokens("opo", [1.0, 0.0], [0, 0], turns=[[1], [3]]) == pytest.approx([0.75] + [-0.25] * 3)


def test_reinforce_plus_plus_baseline_asks_for_whitening() -> None:
    found = ADVANTAGES.get("reinforce_plus_plus_baseline")(episodes([1.0, 0.0], [0, 0]))
    assert found.whiten
    assert found.tokens.tolist() == [0.5, -0.5]


def test_process_supervision_by_hand() -> None:
    # Turn rewards 1, 0 and 0, 1 (the outcome on the last turn): mean 0.5, std √(1/3); later turns are summed.
    found = tokens("grpo_process", [0.0, 1.0], [0, 0], turns=[[1, 1], [1, 1]], turn_rewards=[1.0, 0.0, 0.0, 0.0])
    unit = 0.5 / math.sqrt(1 / 3)
    assert found == pytest.approx([0.0, -unit, 0.0, unit], abs=1e-5)


def test_turn_rewards_are_part_of_the_return() -> None:
    found = tokens("dr_grpo", [1.0, 1.0], [0, 0], turns=[[1, 1], [1]], turn_rewards=[0.5, 0.5, 0.0])
    assert found == pytest.approx([0.5, 0.5, -0.5])


def test_gigpo_by_hand() -> None:
    # Two episodes of two turns, γ = 0.5. Returns of turns: (0.5, 1) and (0, 0). Only the first turns share a state.
    found = tokens(
        "gigpo",
        [1.0, 0.0],
        [0, 0],
        turns=[[1, 2], [1, 1]],
        turn_state=[1, 2, 1, 3],
        options={"gamma": 0.5, "norm": "none", "weight": 2.0},
    )
    assert found == pytest.approx([0.5 + 2 * 0.25, 0.5, 0.5, -0.5 - 2 * 0.25, -0.5])


def test_equal_states_of_other_groups_are_not_compared() -> None:
    found = tokens("gigpo", [1.0, 0.0, 5.0, 5.0], [0, 0, 1, 1], turn_state=[SAME_STATE] * 4)
    assert found[2:] == [0.0, 0.0]


def test_hgpo_by_hand() -> None:
    # γ = 1, K = 1, three episodes of two turns; returns of every turn: 1, 0, 0. States: a b | a b | c b.
    found = tokens(
        "hgpo",
        [1.0, 0.0, 0.0],
        [0, 0, 0],
        turns=[[1, 1]] * 3,
        turn_state=[1, 2, 1, 2, 3, 2],
        options={"gamma": 1.0, "history": 1},
    )
    # depth 0: state a: {1, 0} → ±1; state b: {1, 0, 0} → mean 1/3, std √2/3 → √2, −1/√2, −1/√2.
    # depth 1: (a, b): {1, 0} → ±1; (c, b) is alone. Weights 1 and 2.
    both = [(math.sqrt(2) + 2) / 3, (-math.sqrt(0.5) - 2) / 3]
    assert found == pytest.approx([1.0, both[0], -1.0, both[1], 0.0, -math.sqrt(0.5)], abs=1e-5)


@pytest.mark.parametrize("name", GROUPED)
def test_equal_rewards_say_nothing(name: str) -> None:
    found = tokens(name, [0.1] * 10 + [3.0], [0] * 10 + [1], turn_state=[SAME_STATE] * 11)
    assert found == [0.0] * 11


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
        [True, True, False, True],
        [True, True, False, True],
        [False, False, True, False],
        [True, True, False, True],
    ]
    assert len(set(twice)) == 4


def test_estimators_that_are_whitened() -> None:
    batch = episodes(
        [1.0, 0.0], [0, 0], values=[0.0, 0.0], process_rewards=[0.0, 0.0], greedy=[0.0, 0.0], turn_state=[1, 1]
    )
    assert [name for name in ADVANTAGES.names() if ADVANTAGES.get(name)(batch).whiten] == [
        "gae",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "turn_gae",
        "vapo",
    ]


REWARDS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=4, max_size=9)


@settings(max_examples=25)
@given(REWARDS, st.randoms(use_true_random=False))
@pytest.mark.parametrize("name", GROUPED)
def test_the_order_of_episodes_does_not_matter(name: str, rewards: list[float], random: Any) -> None:
    group = [index % 3 for index in range(len(rewards))]
    order = list(range(len(rewards)))
    random.shuffle(order)
    before = tokens(name, rewards, group, turn_state=[SAME_STATE] * len(rewards))
    after = tokens(name, [rewards[i] for i in order], [group[i] for i in order], turn_state=[SAME_STATE] * len(rewards))
    assert after == pytest.approx([before[i] for i in order], abs=1e-12)


@settings(max_examples=25)
@given(REWARDS, st.floats(0.5, 50), st.floats(-5, 5))
@pytest.mark.parametrize("name", GROUPED)
def test_a_shift_does_not_matter_and_a_scale_scales_or_does_not(
    name: str, rewards: list[float], scale: float, shift: float
) -> None:
    group = [index % 2 for index in range(len(rewards))]
    states = [SAME_STATE] * len(rewards)
    before = torch.tensor(tokens(name, rewards, group, turn_state=states))
    changed = torch.tensor(tokens(name, [scale * r + shift for r in rewards], group, turn_state=states))
    # float32 here; the estimators' ε = 1e-6 shows where rewards are scaled.
    torch.testing.assert_close(changed, before * (scale if name in LINEAR else 1.0), atol=1e-4, rtol=1e-4)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.integers(0, 3)), min_size=2, max_size=12))
@pytest.mark.parametrize("name", GROUPED)
def test_a_group_is_alone_in_the_world(name: str, members: list[tuple[float, int]]) -> None:
    """What other groups there are, and how many members they have, changes nothing."""
    rewards, group = [reward for reward, _ in members], [number for _, number in members]
    together = tokens(name, rewards, group, turn_state=[SAME_STATE] * len(rewards))
    for number in set(group):
        mine = [index for index, other in enumerate(group) if other == number]
        alone = tokens(name, [rewards[i] for i in mine], [0] * len(mine), turn_state=[SAME_STATE] * len(mine))
        assert [together[i] for i in mine] == pytest.approx(alone, abs=1e-12)
