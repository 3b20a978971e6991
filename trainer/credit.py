"""Credit assignment: a rank's batch as estimators see it, and their results, whitened over all ranks.

Overlong reward shaping: long episodes lose reward gradually before they hit the limit.

    penalty(l) = 0                                l ≤ length − buffer
               = −p · (l − (length − buffer)) / buffer       in between
               = −p                               l ≥ length               l = sampled tokens of the episode

Yu et al. 2025, "DAPO" (arXiv:2503.14476), section 3.4, equation 13 (soft overlong punishment).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from penstock.common import pattern_of
from penstock.trainer.advantages import ADVANTAGES, Advantages, Episodes
from penstock.trainer.batch import StepBatch, greedy_baselines
from penstock.trainer.config import OverlongConfig, TrainerConfig
from penstock.trainer.metrics import exact_sum
from penstock.trainer.ranks.distributed import Ranks
from penstock.transfer_queue import Segment, Trajectory


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The models' scores of the rank's N sampled tokens, in the order of rows."""

    kl_rewards: Tensor | None = None
    """[N] −coefficient · KL, under trainer.kl.in_reward"""
    values: Tensor | None = None
    """[N] under a critic; under an implicit reward model its logprobs"""
    process_rewards: Tensor | None = None
    """[N] of the implicit reward model"""
    teacher_gap: Tensor | None = None
    """[N] logπ − log p of the teacher at the start of the step, under trainer.distill.in_advantage"""


def episodes_of(batch: StepBatch, config: TrainerConfig, scores: TokenScores) -> Episodes:
    """`batch` was checked when it was made: turn rewards and turn states are absent or one for each turn."""
    turns = [[_states(segment) for segment in trajectory.segments] for trajectory in batch.trajectories]
    counts = [sum(len(states) for states in segments) for segments in turns]
    lengths = np.array([trajectory.num_sampled for trajectory in batch.trajectories], dtype=np.int64)
    tokens = sum(len(row.targets) for row in batch.rows)
    nothing = torch.zeros(tokens, dtype=torch.float64)
    starts = [0, *accumulate(segment.num_turns for one in batch.trajectories for segment in one.segments)]
    token_turns = [row.turn + start for row, start in zip(batch.rows, starts, strict=False)]
    episodes = Episodes(
        rewards=torch.from_numpy(batch.rewards + overlong_penalties(lengths, config.overlong)),
        group=torch.from_numpy(batch.group),
        turn_rewards=_turn_rewards(batch.trajectories, counts) * config.turn_reward_weight,
        turn_episode=torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.long)),
        turn_state=_turn_states(batch.trajectories, turns),
        turn_path=torch.tensor([key for one in batch.trajectories for key in _paths(one)], dtype=torch.long),
        token_turn=_joined(token_turns, np.int64),
        token_rewards=nothing if scores.kl_rewards is None else scores.kl_rewards.double(),
        trained=_joined([row.mask for row in batch.rows], np.bool_),
        values=None if scores.values is None else scores.values.double(),
        process_rewards=None if scores.process_rewards is None else scores.process_rewards.double(),
    )
    return replace(episodes, greedy=greedy_baselines(batch, episodes.returns))


class Estimators:
    """The run's estimator, and those that data sources have in its place."""

    def __init__(self, config: TrainerConfig, ranks: Ranks) -> None:
        self._ranks = ranks
        self._usual = ADVANTAGES.bind(config.advantage, config.advantage_options)
        self._sources = config.sources
        self._of_sources = {
            pattern: ADVANTAGES.bind(own.advantage, own.advantage_options)
            for pattern, own in config.sources.items()
            if own.advantage is not None
        }

    def __call__(self, episodes: Episodes, data_sources: Sequence[str]) -> Advantages:
        """`data_sources`: of each episode. A collective: every rank calls each estimator, also for no episode."""
        if not self._of_sources:
            return whitened(self._usual(episodes), episodes.trained, self._ranks)
        patterns = [pattern_of(source, self._sources) for source in data_sources]
        tokens = torch.zeros(len(episodes.token_turn), dtype=torch.float64)
        for pattern, estimate in ((None, self._usual), *self._of_sources.items()):
            own = [(one if one in self._of_sources else None) == pattern for one in patterns]
            chosen = torch.tensor(own, dtype=torch.bool)
            part = episodes.only(chosen)
            tokens[chosen[episodes.token_episode]] = whitened(estimate(part), part.trained, self._ranks).tokens
        return Advantages(tokens)


def whitened(advantages: Advantages, trained: Tensor, ranks: Ranks) -> Advantages:
    """Mean 0, variance 1 (n − 1) over all ranks' trained tokens, where the estimator asks for it. A collective."""
    if not advantages.whiten:
        return advantages
    values = advantages.tokens[trained]
    number = max(ranks.sum(len(values)), 1.0)
    mean = exact_sum(values, ranks) / number
    # Two passes: a difference of large sums would lose the variance of nearly equal advantages.
    variance = exact_sum((values - mean).square(), ranks) / max(number - 1, 1.0)
    return replace(advantages, tokens=(advantages.tokens - mean) / (variance + 1e-8) ** 0.5)


def _states(segment: Segment) -> list[int]:
    """A key per turn of what was fed right before it: what came since the last sampled token, or the whole prompt."""
    keys = []
    for start in segment.turn_starts.tolist():
        sampled = np.flatnonzero(segment.response_mask[:start])
        since = int(sampled[-1]) + 1 if len(sampled) else 0
        fed = segment.response_ids[since:start]
        state = fed if len(sampled) else np.concatenate([segment.prompt_ids, fed])
        keys.append(_key(np.ascontiguousarray(state, dtype="<i4").tobytes()))
    return keys


def _key(data: bytes) -> int:
    """int64, so 1 of 2⁶³ pairs of different states has one key"""
    return xxhash.xxh3_64_intdigest(data) >> 1


def _turn_states(trajectories: Sequence[Trajectory], turns: Sequence[Sequence[list[int]]]) -> Tensor:
    """[U] the agent loop's own states if it names one per turn in extra["turn_states"]"""
    states: list[int] = []
    for trajectory, segments in zip(trajectories, turns, strict=True):
        own = trajectory.extra.get("turn_states")
        prefix_keys = [key for keys in segments for key in keys]
        states += prefix_keys if own is None else [_key(repr(state).encode()) for state in own]
    return torch.tensor(states, dtype=torch.long)


def _paths(trajectory: Trajectory) -> list[int]:
    """A key per turn of all ids from the task to the last one that the turn sampled."""
    keys, path = [], xxhash.xxh3_64()
    for segment in trajectory.segments:
        path.update(f"{len(segment.prompt_ids)} ".encode() + segment.prompt_ids.astype("<i4").tobytes())
        ids, done = segment.response_ids.astype("<i4"), 0
        for start, end in pairwise([*segment.turn_starts.tolist(), len(ids)]):
            sampled = np.flatnonzero(segment.response_mask[start:end])
            last = start + (int(sampled[-1]) + 1 if len(sampled) else 0)
            path.update(ids[done:last].tobytes())
            done = last
            keys.append(path.intdigest() >> 1)
        path.update(ids[done:].tobytes())
    return keys


def _turn_rewards(trajectories: Sequence[Trajectory], counts: Sequence[int]) -> Tensor:
    pairs = zip(trajectories, counts, strict=True)
    rewards = [value for one, count in pairs for value in one.turn_rewards or [0.0] * count]
    return torch.tensor(rewards, dtype=torch.float64)


def _joined(arrays: Sequence[NDArray], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype=dtype), *arrays]).astype(dtype))


def overlong_penalties(lengths: NDArray[np.int64], config: OverlongConfig) -> NDArray[np.float64]:
    """lengths [E] → [E], each 0 or below"""
    if config.length == 0:
        return np.zeros(len(lengths))
    beyond = lengths - (config.length - config.buffer)
    share = beyond / config.buffer if config.buffer else (lengths >= config.length).astype(np.float64)
    return -config.penalty * np.clip(share, 0.0, 1.0)
