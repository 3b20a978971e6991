"""A rank's batch as estimators see it: turns and tokens in order over segments, states, rewards; whitening."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from trainer_support import episodes, make_segment, make_trajectory

from penstock.trainer import (
    ModelLimits,
    Ranks,
    StepBatch,
    TrainerConfig,
    make_step_batch,
)
from penstock.trainer.advantages import ADVANTAGES, Advantages, needs_of
from penstock.trainer.config import OverlongConfig, TrainedSourceConfig
from penstock.trainer.credit import Estimators, TokenScores, episodes_of, whitened
from penstock.trainer.metrics import means_by_episode
from penstock.transfer_queue import Batch, Segment, Trajectory

pytestmark = pytest.mark.torch


def batch_of(*trajectories: Trajectory) -> StepBatch:
    limits = ModelLimits(context=256, vocab=64)
    ids = [trajectory.episode_id for trajectory in trajectories]
    return make_step_batch(Batch(1, [ids]), [0], trajectories, 2, limits)


def two_segments(**changes: Any) -> Trajectory:
    """Four turns of two segments: 4 and 7 sampled tokens, then again."""
    rng = np.random.default_rng(0)
    segments = [make_segment(rng, 0, prompt=4, response=14) for _ in range(2)]
    return replace(make_trajectory("train/0", 0, 0), segments=segments, num_turns=4, **changes)


def test_turns_and_tokens_run_on_over_segments() -> None:
    found = episodes_of(batch_of(two_segments(), two_segments()), TrainerConfig(), TokenScores())
    assert found.turn_episode.tolist() == [0] * 4 + [1] * 4
    expected = [turn for turn in range(8) for _ in range(4 if turn % 2 == 0 else 7)]
    assert found.token_turn.tolist() == expected
    assert found.lengths.tolist() == [22.0, 22.0]


def test_a_state_is_what_was_fed_right_before_the_turn() -> None:
    first, second = two_segments(), two_segments()
    other = second.segments[1].response_ids.copy()
    other[5] += 1  # in the second segment's observation
    second = replace(second, segments=[second.segments[0], replace(second.segments[1], response_ids=other)])
    states = episodes_of(batch_of(first, second), TrainerConfig(), TokenScores()).turn_state.tolist()
    assert states[:3] == states[4:7]
    assert states[3] != states[7]
    assert len(set(states[:4])) == 4


def test_paths_are_equal_up_to_the_first_different_answer() -> None:
    """Results of tools between two answers belong to the later turn's path."""
    first, answer, result = two_segments(), two_segments(), two_segments()
    ids = [one.segments[1].response_ids.copy() for one in (answer, result)]
    ids[0][-1] += 1
    ids[1][5] += 1
    changed = [
        replace(one, segments=[one.segments[0], replace(one.segments[1], response_ids=own)])
        for one, own in zip((answer, result), ids, strict=True)
    ]
    paths = episodes_of(batch_of(first, *changed), TrainerConfig(), TokenScores()).turn_path
    assert paths is not None
    same, other_answer, other_result = paths.reshape(3, 4).tolist()
    assert len(set(same)) == 4
    assert [one == other for one, other in zip(same, other_answer, strict=True)] == [True, True, True, False]
    assert [one == other for one, other in zip(same, other_result, strict=True)] == [True, True, True, False]


def one_segment(prompt: list[int], response: list[int], mask: list[int]) -> Trajectory:
    """Of a turn for each run of sampled tokens."""
    sampled = np.array(mask, dtype=np.uint8)
    starts = np.flatnonzero(np.diff(sampled, prepend=0) == 1)
    segment = Segment(
        prompt_ids=np.array(prompt, dtype=np.int32),
        response_ids=np.array(response, dtype=np.int32),
        response_mask=sampled,
        response_logprobs=np.where(sampled == 1, -1.0, 0.0).astype(np.float32),
        version_spans=np.array([[0, 0, len(mask)]], dtype=np.int32),
        turn_starts=starts.astype(np.int32),
    )
    return replace(make_trajectory("train/0", 0, 0), segments=[segment], num_turns=len(starts))


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (one_segment([8], [6, 6, 7, 8, 3], [1, 1, 0, 0, 1]), True),
        (one_segment([1], [5, 4, 8, 9], [1, 0, 0, 1]), False),
        (one_segment([1], [5, 7, 4, 9], [1, 0, 0, 1]), False),
        (one_segment([1], [5, 7, 8, 8, 9], [1, 0, 0, 0, 1]), False),
    ],
    ids=["sampled otherwise", "first fed token", "last fed token", "one more"],
)
def test_a_state_is_all_that_was_fed_since_the_last_turn(other: Trajectory, same: bool) -> None:
    """Not what the model says before or after it."""
    first = one_segment([1], [5, 7, 8, 9], [1, 0, 0, 1])
    states = episodes_of(batch_of(first, other), TrainerConfig(), TokenScores()).turn_state.tolist()
    assert (states[1] == states[3]) is same


def test_a_first_state_is_the_prompt_and_what_was_fed_behind_it() -> None:
    split, whole = one_segment([1], [2, 9], [0, 1]), one_segment([1, 2], [4], [1])
    one, other = episodes_of(batch_of(split, whole), TrainerConfig(), TokenScores()).turn_state.tolist()
    assert one == other


def test_an_agent_loop_may_name_its_states() -> None:
    first = two_segments(extra={"turn_states": ["start", "kitchen", "hall", "kitchen"]})
    states = episodes_of(batch_of(first, first), TrainerConfig(), TokenScores()).turn_state.tolist()
    assert states[1] == states[3] == states[5]
    assert len(set(states)) == 3


def test_turn_rewards_count_by_their_weight() -> None:
    batch = batch_of(two_segments(turn_rewards=(1.0, 0.0, 0.5, 0.0), reward=2.0))
    assert episodes_of(batch, TrainerConfig(), TokenScores()).returns.tolist() == [2.0]
    found = episodes_of(batch, TrainerConfig(turn_reward_weight=0.1), TokenScores())
    assert found.rewards_by_turn().tolist() == pytest.approx([0.1, 0.0, 0.05, 2.0])
    assert found.returns.tolist() == pytest.approx([2.15])
    none = episodes_of(batch_of(two_segments(reward=2.0)), TrainerConfig(turn_reward_weight=0.1), TokenScores())
    assert none.rewards_by_turn().tolist() == [0.0, 0.0, 0.0, 2.0]


def test_long_episodes_lose_reward() -> None:
    config = TrainerConfig(overlong=OverlongConfig(length=24, buffer=4))
    found = episodes_of(batch_of(two_segments(reward=1.0)), config, TokenScores())
    assert found.rewards.tolist() == [0.5]


def test_whitening_is_over_trained_tokens(ranks: Ranks) -> None:
    trained = torch.tensor([True, True, True, False])
    given = Advantages(torch.tensor([1.0, 2.0, 3.0, 100.0], dtype=torch.float64), whiten=True)
    assert whitened(given, trained, ranks).tokens.tolist() == pytest.approx([-1.0, 0.0, 1.0, 98.0])
    assert whitened(replace(given, whiten=False), trained, ranks) is not None
    alone = whitened(given, torch.tensor([True, False, False, False]), ranks).tokens
    assert alone.isfinite().all()
    assert alone.tolist() == pytest.approx([0.0, 1e4, 2e4, 99e4])
    two = whitened(given, torch.tensor([True, True, False, False]), ranks).tokens
    assert two[:2].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_means_by_episode() -> None:
    batch = batch_of(two_segments(), replace(two_segments(), segments=[]))
    assert means_by_episode(torch.full((22,), 0.5, dtype=torch.float64), batch).tolist() == [0.5, 0.0]


SOURCES = ["sums", "sums", "code/a", "sums", "sums", "code/a"]
OWN = {
    "code/*": TrainedSourceConfig(advantage="rloo"),
    "sums": TrainedSourceConfig(advantage="reinforce_plus_plus"),
    "s*": TrainedSourceConfig(group_size=2),
}


def test_each_source_has_the_advantages_of_its_estimator(ranks: Ranks) -> None:
    """As if the others were not there: groups of the one, and the mean and deviation of the other."""
    batch = episodes([1.0, 0.0, 1.0, 0.5, 0.0, 0.0], [0, 0, 1, 2, 2, 1], [[1, 2], [1], [2], [3], [1], [1, 1]])
    found = Estimators(TrainerConfig(sources=OWN), ranks)(batch, SOURCES).tokens
    code = torch.tensor([source != "sums" for source in SOURCES])
    at = code[batch.token_episode]
    assert found[at].tolist() == ADVANTAGES.get("rloo")(batch.only(code)).tokens.tolist() == [1.0, 1.0, -1.0, -1.0]
    sums = batch.only(~code)
    white = whitened(ADVANTAGES.get("reinforce_plus_plus")(sums), sums.trained, ranks).tokens
    assert found[~at].tolist() == white.tolist()
    assert float(white.mean()) == pytest.approx(0.0, abs=1e-12)


def test_sources_that_are_not_named_have_the_usual_estimator(ranks: Ranks) -> None:
    batch = episodes([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1])
    usual = Estimators(TrainerConfig(), ranks)(batch, ["x"] * 4).tokens
    own = {"y": TrainedSourceConfig(advantage="rloo"), "x": TrainedSourceConfig(group_size=2)}
    for data_sources in (["x"] * 4, ["z"] * 4, ["x", "x", "z", "z"]):
        assert Estimators(TrainerConfig(sources=own), ranks)(batch, data_sources).tokens.tolist() == usual.tolist()


def test_every_estimator_of_a_source_takes_no_episodes() -> None:
    """A rank may have none of a source, and whitening waits for all ranks."""
    nothing = episodes([1.0, 0.0], [0, 0]).only(torch.zeros(2, dtype=torch.bool))
    for name in ADVANTAGES.names():
        if not needs_of(ADVANTAGES.get(name)) - {"groups"}:
            assert len(ADVANTAGES.get(name)(nothing).tokens) == 0, name
