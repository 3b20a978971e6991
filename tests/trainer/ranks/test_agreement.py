"""Ranks of one copy of the model compare all that they would train on, before they do."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("torch")

from trainer_support import VOCAB, make_trajectory, taught

from penstock.rollout_server import Mixtures
from penstock.trainer import ModelLimits, StepBatch, make_step_batch
from penstock.trainer.ranks.agreement import BatchesDiffer, check_same_batch
from penstock.trainer.ranks.layout import RankLayout
from penstock.transfer_queue import Batch, Segment, Trajectory

pytestmark = pytest.mark.torch
WAIT_S = 60.0


@dataclass
class RankThread:
    """One of two ranks that share a copy of the model, as a thread of this process."""

    rank: int
    barrier: threading.Barrier
    held: dict[int, Any]
    world: ClassVar[int] = 2
    layout: ClassVar[RankLayout] = RankLayout(context=2)

    def gather(self, mine: Any) -> list[Any]:
        self.held[self.rank] = mine
        self.barrier.wait(WAIT_S)
        found = [self.held[0], self.held[1]]
        self.barrier.wait(WAIT_S)
        return found


def changed(trajectory: Trajectory, **changes: Any) -> Trajectory:
    first, *others = trajectory.segments
    return replace(trajectory, segments=[replace(first, **changes), *others])


def batch_of(*trajectories: Trajectory) -> StepBatch:
    ids = Batch(1, [[one.episode_id for one in trajectories]])
    limits = ModelLimits(context=256, vocab=VOCAB, mixtures=Mixtures(layers=2, experts=8, per_token=2))
    return make_step_batch(ids, [0], trajectories, 2, limits)


def routed(segment: Segment) -> Any:
    length = len(segment.prompt_ids) + len(segment.response_ids)
    order = np.random.default_rng(length).permuted(np.tile(np.arange(8, dtype=np.uint8), (length, 2, 1)), axis=-1)
    return np.ascontiguousarray(order[..., :2])


def whole() -> Trajectory:
    found = taught(make_trajectory("train/0", 0, 1), top_k=4)
    return changed(found, routed_experts=routed(found.segments[0]))


def compare(one: StepBatch, other: StepBatch) -> list[str]:
    """The error that each rank raises."""
    barrier, held = threading.Barrier(2), dict[int, Any]()

    def ask(rank: int, batch: StepBatch) -> str:
        ranks: Any = RankThread(rank, barrier, held)
        try:
            check_same_batch(ranks, batch)
        except BatchesDiffer as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(ask, (0, 1), (one, other)))


def test_equal_batches_agree() -> None:
    assert compare(batch_of(whole()), batch_of(whole())) == ["", ""]


def refused(**changes: Any) -> bool:
    held = whole()
    told = compare(batch_of(held), batch_of(changed(held, **changes)))
    assert told[0] == told[1]
    return told[0].startswith("step 1: the ranks hold different batches")


@pytest.mark.parametrize(
    "name", ["response_logprobs", "teacher_logprobs", "teacher_top_logprobs", "teacher_top_ids", "routed_experts"]
)
def test_batches_with_one_other_number_are_refused(name: str) -> None:
    values = getattr(whole().segments[0], name).copy()
    values.flat[0] = values.flat[0] - 1 if values.dtype == np.float32 else 7 - values.flat[0] % 7
    assert refused(**{name: values})


@pytest.mark.parametrize(
    "names", [("teacher_logprobs",), ("teacher_top_ids", "teacher_top_logprobs"), ("routed_experts",)]
)
def test_batches_that_lack_an_array_are_refused(names: tuple[str, ...]) -> None:
    assert refused(**dict.fromkeys(names))
