"""Every call of the queue's protocol that the benchmarks make outside of their clocks, and a step's consumption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.transfer_queue import (
    COMPLETED,
    Announcement,
    Batch,
    DataCursor,
    Lease,
    Limits,
    QueueError,
    RedisTransferQueue,
    Segment,
    Task,
    Trajectory,
    TransferQueue,
    TransferQueueConfig,
)

GROUP_SIZE = 4
TINY = Segment(
    prompt_ids=np.arange(8, dtype=np.int32),
    response_ids=np.arange(16, dtype=np.int32),
    response_mask=np.ones(16, dtype=np.uint8),
    response_logprobs=np.full(16, -0.5, dtype=np.float32),
    version_spans=np.array([[0, 0, 16]], dtype=np.int32),
    turn_starts=np.array([0], dtype=np.int32),
)
"""For episodes whose size is not what is measured."""


async def open_queue(url: str, password: str, run: str) -> RedisTransferQueue:
    return await RedisTransferQueue.connect(url, run, TransferQueueConfig(), password=password)


def tasks(first: int, count: int) -> list[Task]:
    """Tasks number `first` and on of the training stream, each about 150 bytes packed."""
    return [
        Task(f"train/{number:08d}", "train", [{"role": "user", "content": "?"}], "bench", "0")
        for number in range(first, first + count)
    ]


async def start_run(queue: TransferQueue, groups: int) -> None:
    """A run whose step 0 takes `groups` groups, all queued."""
    await queue.create_run(Limits(GROUP_SIZE, groups, max_staleness=0), "{}")
    await queue.submit(tasks(0, groups), DataCursor(0, groups))


async def leased_work(queue: TransferQueue, worker: str, count: int) -> list[Lease]:
    leases = await queue.lease_episodes(worker, count, 0)
    if len(leases) != count:
        raise QueueError(f"{worker} was given {len(leases)} episodes, not {count}")
    return leases


async def consume_step(queue: TransferQueue, step: int) -> Sequence[Trajectory]:
    """What a trainer does with a step: its batch, the payloads, the new version, the checkpoint's commit."""
    batch = await queue.lease_batch(step)
    if not isinstance(batch, Batch):
        raise QueueError(f"step {step} is not ready: {batch.cause}")
    trajectories = await queue.read([episode for group in batch.groups for episode in group])
    await queue.publish_version(Announcement(step + 1, {}))
    await queue.commit(step + 1)
    return trajectories


async def make_ready(queue: TransferQueue, version: int) -> None:
    """All that must be before `version` can be announced: its step has a batch, of one episode.

    For runs with `group_size` 1 and `groups_per_step` 1.
    """
    step = version - 1
    await queue.submit(tasks(step, 1), DataCursor(0, version))
    (lease,) = await queue.lease_episodes("bench", 1, step)
    segment = replace(TINY, version_spans=np.array([[step, 0, len(TINY.response_ids)]], dtype=np.int32))
    await queue.complete(lease, Trajectory(lease.episode_id, lease.task.task_id, (segment,), 1.0, COMPLETED))
    if not isinstance(batch := await queue.lease_batch(step), Batch):
        raise QueueError(f"step {step} is not ready: {batch.cause}")
