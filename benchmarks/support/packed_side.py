"""Our trainer's step: pack, advantages, corrected and clipped loss, update. No queue: its batch is in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.support import train_side
from benchmarks.support.meter import Meter
from benchmarks.support.train_side import Done, Settings
from benchmarks.support.work import EPSILON, Work
from penstock.trainer import Learner, Ranks, StepBatch, TrainerConfig, make_step_batch, pack_rows
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.transfer_queue import COMPLETED, Batch, Segment, Trajectory

COLLECTIVE_TIMEOUT_S = 600.0


class PackedSide:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._config = trainer_config(settings)
        self._ranks = Ranks.open(COLLECTIVE_TIMEOUT_S)
        self._engine = FSDPEngine(settings.model, self._config, self._ranks)
        self._learner = Learner(self._config, self._engine, self._ranks.data)
        self._batch: StepBatch | None = None

    def load(self, work: Work) -> None:
        """The engine that sampled is the trainer's own model: importance weights are 1, as they are on other sides."""
        unscored = self._made(work, None)
        packs = pack_rows(unscored.rows, self._settings.micro_tokens)
        logprobs = np.zeros(sum(work.lengths), dtype=np.float32)
        for pack, scores in zip(packs, self._engine.score(packs), strict=True):
            logprobs[pack.token.numpy()] = scores.numpy()
        self._batch = self._made(work, logprobs)

    def step(self, *, memory: bool = False) -> Done:
        assert self._batch is not None
        with Meter(memory=memory) as meter:
            scored = self._learner.score(self._batch)
            advantages = self._learner.advantages(self._batch, scored)
            metrics = self._learner.update(self._batch, scored, advantages)
        if metrics["updates"] != 1:
            raise ArithmeticError(f"the update was skipped: {metrics}")
        return Done(meter.seconds, meter.cpu_s, metrics["grad_norm"], meter.peak_bytes, metrics["tokens"])

    def close(self) -> None:
        self._ranks.close()

    def _made(self, work: Work, logprobs: Any) -> StepBatch:
        groups = _trajectories(work, logprobs)
        ids = Batch(0, [[one.episode_id for one in group] for group in groups])
        flat = [one for group in groups for one in group]
        return make_step_batch(ids, range(len(groups)), flat, 0, self._engine.limits)


def trainer_config(settings: Settings) -> TrainerConfig:
    """The trainer's own defaults, but for what makes the numbers those of the other sides."""
    return TrainerConfig(
        lr=train_side.LEARNING_RATE,
        betas=train_side.BETAS,
        max_grad_norm=train_side.MAX_GRAD_NORM,
        loss_options={"clip_low": train_side.CLIP_LOW, "clip_high": train_side.CLIP_HIGH},
        advantage_options={"epsilon": EPSILON},
        dtype=settings.dtype,
        micro_batch_tokens=settings.micro_tokens,
    )


def _trajectories(work: Work, logprobs: Any) -> list[list[Trajectory]]:
    """`logprobs`: [sum of lengths], of all sampled tokens in the order of rows; None: 0 each."""
    rows = [_segment(work, index) for index in range(len(work.lengths))]
    if logprobs is not None:
        parts = np.split(logprobs, np.cumsum(work.lengths)[:-1])
        rows = [replace(row, response_logprobs=part) for row, part in zip(rows, parts, strict=True)]
    episodes = [_trajectory(work, number, row) for number, row in enumerate(rows)]
    return [episodes[start : start + work.group_size] for start in range(0, len(episodes), work.group_size)]


def _trajectory(work: Work, number: int, row: Segment) -> Trajectory:
    group, member = divmod(number, work.group_size)
    name = f"train/{group}"
    return Trajectory(f"{name}#{member}", name, [row], work.reward(number), COMPLETED, num_turns=1)


def _segment(work: Work, index: int) -> Segment:
    ids, length = work.row(index).astype(np.int32), work.lengths[index]
    return Segment(
        prompt_ids=ids[: work.prompt],
        response_ids=ids[work.prompt :],
        response_mask=np.ones(length, dtype=np.uint8),
        response_logprobs=np.zeros(length, dtype=np.float32),
        version_spans=np.array([[0, 0, length]], dtype=np.int32),
        turn_starts=np.array([0], dtype=np.int32),
    )
