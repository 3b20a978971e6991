"""Evaluation during training: greedy episodes in a split of their own, on a policy version or newer.

    start(v) ──► task: submit split eval/v ─► poll until all are done ─► mean reward ─► eval.jsonl, metrics.jsonl

Neither training nor rollout waits for it. One at a time: one that falls due while another runs is left out. A server
for evaluations (`rollout.evaluation_server`) keeps its version until the end. Others may load newer ones meanwhile,
also within an episode; the versions that sampled are reported.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import numpy as np

from penstock.common import cancel_and_wait
from penstock.trainer.data.rows import DatasetRow
from penstock.trainer.state.recorder import Recorder
from penstock.trainer.timeline import Timeline, Track
from penstock.transfer_queue import Trajectory, TransferQueue, evaluation_split

POLL_S = 0.25

logger = logging.getLogger(__name__)


class Evaluator:
    """Only rank 0 evaluates. Without rows every method is a no-op. An evaluation of which no episode ends for
    `idle_timeout_s` is given up, so that later ones can start."""

    def __init__(
        self,
        queue: TransferQueue,
        rows: Sequence[DatasetRow],
        recorder: Recorder,
        timeline: Timeline | None = None,
        idle_timeout_s: float = 1800.0,
    ) -> None:
        self._queue = queue
        self._timeline = timeline or Timeline()
        self._rows = rows
        self._recorder = recorder
        self._idle_timeout_s = idle_timeout_s
        self._task: asyncio.Task[None] | None = None
        self._version = -1

    def start(self, version: int) -> bool:
        """Begin to evaluate `version`; False if there is nothing to evaluate on, or one is under way."""
        busy = self._task is not None and not self._task.done()
        if not self._rows or busy:
            return False
        self._raise_failure()
        self._version = version
        self._task = asyncio.create_task(self._run(version), name=f"evaluate version {version}")
        return True

    async def finish(self, version: int, timeout_s: float) -> None:
        """Evaluate `version` and wait for it; a log line says so where `timeout_s` was too short."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.settle()
                if self._version != version and self.start(version):
                    await self.settle()
        except TimeoutError:
            await self.close()
            splits = (await self._queue.status()).other_splits
            logger.error("the evaluation of version %d was not done within %.0f s: %s", version, timeout_s, splits)

    async def settle(self) -> None:
        if self._task is not None:
            await asyncio.wait({self._task})
            self._raise_failure()

    async def close(self) -> None:
        if self._task is not None:
            await cancel_and_wait([self._task])
            self._task = None

    def _raise_failure(self) -> None:
        if self._task is not None:
            self._task.result()

    async def _run(self, version: int) -> None:
        began = time.monotonic()
        split = evaluation_split(version)
        tasks = [
            row.task(f"{split}/{number:08d}", split, sampling={"temperature": 0.0}, min_version=version)
            for number, row in enumerate(self._rows)
        ]
        with self._timeline.during(Track.EVALUATION, "evaluation", version):
            await self._queue.submit(tasks)
            await self._until_done(split, version)
            trajectories, _ = await self._queue.results(split)
            result = summarise(trajectories, len(tasks)) | by_version(trajectories, version)
            await asyncio.to_thread(self._recorder.evaluation, version, result, time.monotonic() - began)
            await self._queue.drop_split(split)

    async def _until_done(self, split: str, version: int) -> None:
        """Until every episode ended, or none did for `idle_timeout_s`: what is still out then counts as failed."""
        before, changed = -1, time.monotonic()
        while True:
            counts = (await self._queue.status()).other_splits.get(split, {})
            out = counts.get("queued", 0) + counts.get("leased", 0)
            if not out:
                return
            if out != before:
                before, changed = out, time.monotonic()
            if time.monotonic() - changed > self._idle_timeout_s:
                logger.error(
                    "the evaluation of version %d is given up: none of its last %d episodes ended within %.0f s; "
                    "they count as failed",
                    version,
                    out,
                    self._idle_timeout_s,
                )
                return
            await asyncio.sleep(POLL_S)


def by_version(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Return the measurements of an evaluation of `version`: the oldest and the newest version that sampled, and the
    share of sampled tokens that are of the version itself.
    """
    spans = [segment.version_spans for trajectory in trajectories for segment in trajectory.segments]
    joined = np.concatenate([np.zeros((0, 3), dtype=np.int64), *spans])
    versions, tokens = joined[:, 0], joined[:, 2] - joined[:, 1]
    if not len(versions):
        return {}
    own = tokens[versions == version].sum() / max(tokens.sum(), 1)
    return {"version_oldest": float(versions.min()), "version_newest": float(versions.max()), "own_tokens": float(own)}


def summarise(trajectories: Sequence[Trajectory], expected: int) -> dict[str, float]:
    """Mean over the episodes that carry a reward; those lost to infrastructure are counted, never scored 0."""
    rewards = [t.reward for t in trajectories if t.reward is not None]
    result = {"episodes": float(len(rewards)), "failed": float(expected - len(rewards))}
    if rewards:
        result |= {"reward": float(np.mean(rewards)), "reward_std": float(np.std(rewards))}
    for name in sorted({name for t in trajectories for name in t.metrics}):
        result[f"episode/{name}"] = float(np.mean([t.metrics[name] for t in trajectories if name in t.metrics]))
    return result
