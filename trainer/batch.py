"""The data of one optimizer step: checked rows of this rank's episodes.

queue.Batch (all groups, ids only) ──share──► queue.read ──► `StepBatch` (episodes, rows) ──pack──► engine

For ReMax, the greedy member of each group is the baseline of the others and is not trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.rollout_server import Mixtures
from penstock.trainer.data.images import UnreadableImages, encoded_images
from penstock.transfer_queue import BadPayload, Batch, RoutedExperts, Segment, Trajectory, check_turns

NO_ID = -1


class BadBatch(ValueError):
    """A trajectory cannot be trained on; the message names the episode, the segment and the fault."""


class UntrainableEpisodes(ValueError):
    """Episodes of a batch cannot be trained on."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__(next(iter(problems.values())))
        self.problems = problems
        """Episode id → what is wrong with it."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits of the trainer's model."""

    context: int
    """Longest row, in tokens."""
    vocab: int
    width: int = 1024
    """Width of the hidden states: it determines the row length from which attention costs as much as all else."""
    mixtures: Mixtures | None = None
    """Layers with experts, if the engine's choices are replayed."""
    image_token: int | None = None
    """Id that stands for a part of an image; None: it is trained without images."""


@dataclass(frozen=True, slots=True)
class Row:
    """One segment as the model reads it. L = prompt + response tokens, N = sampled tokens."""

    episode: int
    """Index into the batch's episodes."""
    ids: NDArray[np.int64]
    """[L]"""
    targets: NDArray[np.int64]
    """[N] positions in `ids` of the sampled tokens, each at least 1."""
    behaviour: NDArray[np.float32]
    """[N] the engine's logprobs."""
    staleness: NDArray[np.int64]
    """[N] step − policy version of each token."""
    mask: NDArray[np.bool_]
    """[N] trained on; False where the token is over the staleness bound or has no finite logprob."""
    same_version: NDArray[np.bool_]
    """[N] its whole call was sampled at the trainer's version. After a swap in mode ``keep`` a call continues with the
    keys and values of the weights before: no forward pass of any one version repeats its logprobs."""
    turn: NDArray[np.int64]
    """[N] index among the segment's turns"""
    teacher: NDArray[np.float32] | None = None
    """[N] the teacher's logprobs; None where the segment has none."""
    experts: RoutedExperts | None = None
    """[L, layers, k] as `Segment.routed_experts`; None if there are none, or if they are not replayed."""
    first_token: int = 0
    """Index of the first sampled token among all of the rank's, in the order of rows"""
    top_ids: NDArray[np.int32] | None = None
    """[N, k] the teacher's likeliest ids in the place of each token; `NO_ID` where the model has no such id, which then
    counts to the rest. None where the teacher was not asked for them."""
    top_logprobs: NDArray[np.float32] | None = None
    """[N, k] the teacher's logprobs of them; 0 for `NO_ID`."""
    images: Sequence[bytes] = ()
    """The encoded images (PNG, JPEG …) in the order of their places in `ids`."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A rank's share of a step. E = its episodes."""

    step: int
    groups: Sequence[Sequence[str]]
    """All groups of the step on all ranks: episode ids."""
    trajectories: Sequence[Trajectory]
    """[E] of this rank."""
    group: NDArray[np.int64]
    """[E] index into `groups`."""
    rows: Sequence[Row]

    @property
    def rewards(self) -> NDArray[np.float64]:
        return np.array([t.reward for t in self.trajectories], dtype=np.float64)

    @property
    def rewards_by_task(self) -> dict[str, list[float]]:
        """Task id → rewards of its episodes, of this rank's share."""
        rewards: dict[str, list[float]] = {}
        for trajectory, reward in zip(self.trajectories, self.rewards.tolist(), strict=True):
            rewards.setdefault(trajectory.task_id, []).append(reward)
        return rewards


def share_of(batch: Batch, rank: int, world: int, minibatches: int, costs: Sequence[float] | None = None) -> list[int]:
    """The groups of `batch` that `rank` trains: whole groups, dealt inside each minibatch.

    Dealing inside minibatches keeps every minibatch the same set of groups on any number of ranks. `costs`: by group,
    the same on all ranks; each group, the dearest first, goes to the rank that has the least so far (Graham 1969,
    "Bounds on Multiprocessing Timing Anomalies", section on LPT). None: in turn.
    """
    price = [1.0] * len(batch.groups) if costs is None else costs
    mine: list[int] = []
    for start, end in minibatch_bounds(len(batch.groups), minibatches):
        shares: list[list[int]] = [[] for _ in range(world)]
        spent = [0.0] * world
        for group in sorted(range(start, end), key=lambda g: (-price[g], g)):
            poorest = min(range(world), key=lambda r: (spent[r], len(shares[r]), r))
            shares[poorest].append(group)
            spent[poorest] += price[group]
        mine += sorted(shares[rank])
    return mine


def row_cost(tokens: int, width: int) -> float:
    """Return the cost of a forward and backward over one row, in tokens of a very short row: matrices cost 24·width²
    per token and layer, attention to half of the row 2·tokens·width·2 (multiply and add).
    """
    return tokens * (1 + tokens / (12 * width))


def minibatch_bounds(groups: int, minibatches: int) -> list[tuple[int, int]]:
    """[minibatches] half-open ranges that share out 0 … groups − 1 in order, sizes differing by at most one."""
    edges = [groups * index // minibatches for index in range(minibatches + 1)]
    return list(pairwise(edges))


def make_step_batch(
    batch: Batch,
    share: Sequence[int],
    trajectories: Sequence[Trajectory],
    bound: int,
    model: ModelLimits,
    *,
    has_labels: bool = False,
) -> StepBatch:
    """`trajectories` are those of the groups in `share`, in order; `bound` is max_staleness; `has_labels`: rewards are
    labels of an implicit reward model. Raises `UntrainableEpisodes` naming each."""
    group = [index for index in share for _ in batch.groups[index]]
    rows: list[Row] = []
    problems: dict[str, str] = {}
    for index, trajectory in enumerate(trajectories):
        try:
            _check_rewards(trajectory, has_labels)
            rows += _rows_of(index, trajectory, batch.step, bound, model)
        except BadBatch as error:
            problems[trajectory.episode_id] = str(error)
    if problems:
        raise UntrainableEpisodes(problems)
    return StepBatch(batch.step, batch.groups, trajectories, np.array(group, dtype=np.int64), number_tokens(rows))


def _check_rewards(trajectory: Trajectory, has_labels: bool) -> None:
    where, reward = f"episode {trajectory.episode_id}", trajectory.reward
    if reward is None or not np.isfinite(reward):
        raise BadBatch(f"{where}: reward is {reward}")
    if has_labels and not 0 <= reward <= 1:
        raise BadBatch(
            f"{where}: reward {reward:g} is not from 0 to 1, and trainer.advantage=prime learns from it as a label: "
            "scale the rewards"
        )
    try:
        check_turns(trajectory)
    except BadPayload as error:
        raise BadBatch(f"{where}: {error}") from error


def _rows_of(episode: int, trajectory: Trajectory, step: int, bound: int, model: ModelLimits) -> list[Row]:
    images = images_by_segment(trajectory, model)
    return [
        make_row(episode, segment, _where(trajectory, number), step=step, bound=bound, model=model, images=of_row)
        for number, (segment, of_row) in enumerate(zip(trajectory.segments, images, strict=True))
    ]


def number_tokens(rows: Sequence[Row]) -> list[Row]:
    ends = np.cumsum([len(row.targets) for row in rows]).tolist()
    return [replace(row, first_token=end - len(row.targets)) for row, end in zip(rows, ends, strict=True)]


def images_by_segment(trajectory: Trajectory, model: ModelLimits) -> list[list[bytes]]:
    """See `encoded_images`. Raises `BadBatch`."""
    if trajectory.images is None:
        return [[] for _ in trajectory.segments]
    where = f"episode {trajectory.episode_id}"
    if model.image_token is None:
        raise BadBatch(f"{where}: it has images, and the trainer's model sees none: both sides must load one model")
    try:
        return encoded_images(trajectory.images)
    except UnreadableImages as error:
        raise BadBatch(f"{where}: {error}") from error


def make_row(
    episode: int,
    segment: Segment,
    where: str,
    *,
    step: int,
    bound: int,
    model: ModelLimits,
    images: Sequence[bytes] = (),
) -> Row:
    """Check one segment and lay it out. Raises `BadBatch` with `where` in front."""
    ids = np.concatenate([segment.prompt_ids, segment.response_ids]).astype(np.int64)
    _check_ids(ids, where, model)
    sampled = np.flatnonzero(segment.response_mask)
    targets = sampled + len(segment.prompt_ids)
    if len(sampled) and targets[0] == 0:
        raise BadBatch(f"{where}: the prompt is empty, so its first sampled token has no context")
    staleness = step - segment.versions()[sampled].astype(np.int64)
    if (staleness < 0).any():
        raise BadBatch(
            f"{where}: a token of version {step - staleness.min()} in step {step}, before that was published"
        )
    behaviour = segment.response_logprobs[sampled].astype(np.float32)
    mask = (staleness <= bound) & np.isfinite(behaviour)
    finite = np.nan_to_num(behaviour, nan=0.0, posinf=0.0, neginf=0.0)
    turn = np.searchsorted(segment.turn_starts, sampled, side="right").astype(np.int64) - 1
    # Every token of the call has staleness 0.
    same_version = ~np.isin(turn, np.unique(turn[staleness != 0]))
    unread = _behind_sampled_place(ids[targets], model)
    mask, same_version = mask & ~unread, same_version & ~unread
    taught = segment.teacher_logprobs
    teacher = None if taught is None else taught[sampled].astype(np.float32)
    experts = _experts(segment, where, model)
    top_ids, top_logprobs = _tops(segment, model)
    return Row(
        episode,
        ids,
        targets,
        finite,
        staleness,
        mask,
        same_version,
        turn,
        teacher,
        experts,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        images=tuple(images),
    )


def _behind_sampled_place(sampled: NDArray[np.int64], model: ModelLimits) -> NDArray[np.bool_]:
    """[N] which sampled tokens come after one that stands for a part of an image. It has no image, so
    no forward with pixels repeats what the engine read there; such an answer ends its segment."""
    if model.image_token is None:
        return np.zeros(len(sampled), dtype=np.bool_)
    places = sampled == model.image_token
    return (np.cumsum(places) - places) > 0


def _tops(segment: Segment, model: ModelLimits) -> tuple[NDArray[np.int32] | None, NDArray[np.float32] | None]:
    """See `Row`. A teacher may have more ids than the model, such as those that fill up its matrices."""
    ids, logprobs = segment.teacher_top_ids, segment.teacher_top_logprobs
    if ids is None or logprobs is None:
        return None, None
    foreign = ids >= model.vocab
    return np.where(foreign, np.int32(NO_ID), ids), np.where(foreign, np.float32(0.0), logprobs)


def _experts(segment: Segment, where: str, model: ModelLimits) -> RoutedExperts | None:
    """Raises `BadBatch` for those of another model."""
    experts, mixtures = segment.routed_experts, model.mixtures
    if experts is None or mixtures is None:
        return None
    if experts.shape[1:] != (mixtures.layers, mixtures.per_token) or int(experts.max(initial=0)) >= mixtures.experts:
        raise BadBatch(
            f"{where}: routed experts up to {experts.max(initial=0)} of {experts.shape[1]} layers, {experts.shape[2]} "
            f"each; the trainer's model has {mixtures.layers} layers with {mixtures.per_token} of {mixtures.experts} "
            "experts; do both load one model?"
        )
    return experts


def _where(trajectory: Trajectory, segment: int) -> str:
    return f"episode {trajectory.episode_id}, segment {segment}"


def _check_ids(ids: NDArray[np.int64], where: str, model: ModelLimits) -> None:
    if len(ids) > model.context:
        raise BadBatch(
            f"{where}: {len(ids)} tokens, the model's context holds {model.context}; lower rollout.max_model_len"
        )
    if len(ids) and (ids.min() < 0 or ids.max() >= model.vocab):
        bad = ids.max() if ids.max() >= model.vocab else ids.min()
        raise BadBatch(f"{where}: token id {bad}, the trainer's vocabulary has {model.vocab}; do both load one model?")


GREEDY_MEMBER = 0
"""Member of each group that is sampled greedily for algorithms that need it: it is the baseline and is not trained on.
"""


def without_greedy(batch: StepBatch) -> StepBatch:
    """Greedy episodes are not trained on, nor is a group whose greedy member was lost: it has no baseline."""
    greedy = greedy_members(batch)
    trained = ~greedy & np.isin(batch.group, batch.group[greedy])
    rows = [replace(row, mask=row.mask & trained[row.episode]) for row in batch.rows]
    return replace(batch, rows=rows)


def greedy_members(batch: StepBatch) -> NDArray[np.bool_]:
    """[E]"""
    return np.array([t.episode_id.endswith(f"#{GREEDY_MEMBER}") for t in batch.trajectories], dtype=np.bool_)


def greedy_baselines(batch: StepBatch, returns: Tensor) -> Tensor:
    """returns [E] → [E] that of the group's greedy member; 0 if it was lost"""
    greedy = greedy_members(batch)
    by_group = dict(zip(batch.group[greedy].tolist(), returns.numpy()[greedy].tolist(), strict=True))
    return torch.tensor([by_group.get(group, 0.0) for group in batch.group.tolist()], dtype=torch.float64)
