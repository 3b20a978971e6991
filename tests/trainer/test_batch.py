"""Rows from segments: what is trained on, what is masked, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from trainer_support import make_segment, make_trajectory

from penstock.trainer import BadBatch, ModelLimits, make_row, make_step_batch
from penstock.trainer.batch import UntrainableEpisodes, minibatch_bounds, number_tokens, row_cost, share_of
from penstock.transfer_queue import Batch, EpisodeImages

pytestmark = pytest.mark.torch
LIMITS = ModelLimits(context=64, vocab=64)


def segment():
    return make_segment(np.random.default_rng(0), version=3, prompt=4, response=9)


def row_of(given, step: int = 3, bound: int = 2):
    return make_row(0, given, "episode e, segment 0", step=step, bound=bound, model=LIMITS)


def test_targets_are_the_sampled_positions() -> None:
    row = row_of(segment())
    assert row.targets.tolist() == [4, 5, 6, 8, 9, 10, 11, 12]
    assert row.mask.all()
    assert row.staleness.tolist() == [0] * 8


def test_tokens_over_the_bound_and_without_logprob_are_masked() -> None:
    given = segment()
    mixed = replace(given, version_spans=np.array([[3, 0, 5], [5, 5, 9]], dtype=np.int32))
    assert row_of(mixed, step=6).mask.tolist() == [False] * 4 + [True] * 4
    logprobs = given.response_logprobs.copy()
    logprobs[[0, 8]] = [np.nan, -np.inf]
    row = row_of(replace(given, response_logprobs=logprobs))
    assert row.mask.tolist() == [False, *[True] * 6, False]
    assert row.behaviour[[0, -1]].tolist() == [0.0, 0.0]
    logprobs[0] = np.inf
    assert row_of(replace(given, response_logprobs=logprobs)).behaviour[0] == 0.0


def test_a_call_that_went_on_over_an_update_is_not_compared_with_one_version() -> None:
    """In mode keep its later tokens saw keys and values of the old weights; the next call saw new ones only."""
    given = make_segment(np.random.default_rng(0), version=3, prompt=4, response=9)
    assert row_of(given).same_version.all()
    spans = np.array([[2, 0, 2], [3, 2, 9]], dtype=np.int32)
    row = row_of(replace(given, version_spans=spans, turn_starts=np.array([0, 4], dtype=np.int32)))
    assert row.staleness.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert row.same_version.tolist() == [False] * 3 + [True] * 5


@pytest.mark.parametrize(
    ("changes", "step", "message"),
    [
        ({"prompt_ids": np.zeros(60, np.int32)}, 3, "69 tokens, the model's context holds 64"),
        ({"prompt_ids": np.full(4, 64, np.int32)}, 3, "token id 64, the trainer's vocabulary has 64"),
        ({"prompt_ids": np.full(4, -2, np.int32)}, 3, "token id -2"),
        ({"prompt_ids": np.zeros(0, np.int32)}, 3, "the prompt is empty"),
        ({}, 2, "version 3 in step 2"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(changes: dict, step: int, message: str) -> None:
    with pytest.raises(BadBatch, match=f"episode e, segment 0.*{message}"):
        row_of(replace(segment(), **changes), step=step)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": float("nan")}, "reward is nan"),
        ({"reward": -1.0}, "reward -1 is not from 0 to 1"),
        ({"turn_rewards": (1.0,)}, "turn_rewards: 1 for 2 turns"),
        ({"turn_rewards": (1.0, float("nan"))}, "turn_rewards: nan is not finite"),
        ({"extra": {"turn_states": ["start"]}}, "extra.turn_states: 1 for 2 turns"),
        ({"images": EpisodeImages([["a"]], {"a": b"picture"})}, "it has images"),
    ],
)
def test_every_episode_that_cannot_be_trained_is_named(changes: dict, message: str) -> None:
    made = [make_trajectory("train/0", member, 0) for member in range(3)]
    made[1:] = [replace(one, **changes) for one in made[1:]]
    batch = Batch(0, [[one.episode_id for one in made]])
    with pytest.raises(UntrainableEpisodes, match=f"episode train/0#1: {message}") as refused:
        make_step_batch(batch, [0], made, 2, LIMITS, has_labels=True)
    assert list(refused.value.problems) == ["train/0#1", "train/0#2"]


def test_ranks_share_whole_groups_and_minibatches_stay_the_same_sets() -> None:
    batch = Batch(0, [[f"g{n}"] for n in range(5)])
    assert minibatch_bounds(5, 2) == [(0, 2), (2, 5)]
    shares = [share_of(batch, rank, 2, 2) for rank in range(2)]
    assert shares == [[0, 2, 4], [1, 3]]
    assert sorted(shares[0] + shares[1]) == list(range(5))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=24), st.integers(1, 5), st.integers(1, 4))
def test_groups_are_dealt_by_cost_each_once_and_evenly(costs: list[int], world: int, minibatches: int) -> None:
    """Longest first: no rank is ahead of another by more than one group of its own."""
    minibatches = min(minibatches, len(costs))
    batch = Batch(0, [[f"{n}"] for n in range(len(costs))])
    shares = [share_of(batch, rank, world, minibatches, costs) for rank in range(world)]
    assert sorted(group for share in shares for group in share) == list(range(len(costs)))
    for start, end in minibatch_bounds(len(costs), minibatches):
        mine = [[g for g in share if start <= g < end] for share in shares]
        spent = [sum(costs[g] for g in groups) for groups in mine]
        for groups, total in zip(mine, spent, strict=True):
            if groups:
                assert total - min(costs[g] for g in groups) <= min(spent)


def test_equal_costs_are_dealt_in_turn() -> None:
    batch = Batch(0, [[f"{n}"] for n in range(7)])
    assert [share_of(batch, rank, 3, 1) for rank in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]
    assert share_of(batch, 0, 2, 1, [9, 1, 1, 1, 1, 1, 4]) == [0]


def test_a_row_may_fill_the_context_and_begin_with_id_zero() -> None:
    row = row_of(replace(segment(), prompt_ids=np.zeros(55, np.int32)))
    assert len(row.ids) == LIMITS.context
    assert row.targets[0] == 55
    assert row_of(replace(segment(), prompt_ids=np.zeros(1, np.int32))).targets[0] == 1


def test_tokens_are_numbered_over_rows() -> None:
    rows = [row_of(segment()) for _ in range(3)]
    assert [row.first_token for row in rows] == [0, 0, 0]
    assert [row.first_token for row in number_tokens(rows)] == [0, 8, 16]


def test_rewards_by_task_are_those_of_its_episodes() -> None:
    made = [make_trajectory(f"train/{task}", member, 0) for task, member in ((0, 0), (0, 1), (1, 0))]
    given = [replace(one, reward=reward) for one, reward in zip(made, (1.0, 0.25, 0.5), strict=True)]
    batch = make_step_batch(Batch(0, [["train/0#0", "train/0#1"], ["train/1#0"]]), [0, 1], given, 2, LIMITS)
    assert batch.rewards_by_task == {"train/0": [1.0, 0.25], "train/1": [0.5]}


def test_a_row_costs_its_matrices_and_its_attention() -> None:
    """From 12 widths on, attention costs as much as all else."""
    assert row_cost(10, 1024) == pytest.approx(10 * (1 + 10 / 12288))
    assert row_cost(12 * 1024, LIMITS.width) == pytest.approx(2 * 12 * 1024)
