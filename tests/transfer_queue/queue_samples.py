"""Small tasks, trajectories and queues for the tests of this folder."""

from __future__ import annotations

import numpy as np

from penstock.transfer_queue import (
    COMPLETED,
    Announcement,
    Batch,
    DataCursor,
    JournalEntry,
    JournalKind,
    Lease,
    Limits,
    Outcome,
    OutcomeKind,
    Segment,
    Task,
    Trajectory,
    TransferQueue,
)

INFRA = Outcome(OutcomeKind.INFRA_ERROR, "the box died", "sandbox")
LIMITS = Limits(group_size=2, groups_per_step=2, max_staleness=1, lease_ttl_s=30.0)


def task(number: int, split: str = "train", min_version: int = 0, *, source: str = "sums", priority: int = 0) -> Task:
    messages = [{"role": "user", "content": f"{number} + 1"}]
    name = f"{split}/{number:04d}"
    return Task(name, split, messages, source, number + 1, min_version=min_version, priority=priority)


def tasks(count: int, start: int = 0) -> list[Task]:
    return [task(number) for number in range(start, start + count)]


def segment(versions: list[int], prompt: int = 3) -> Segment:
    """One sampled token per version given, then one observed token."""
    length = len(versions) + 1
    return Segment(
        prompt_ids=np.arange(prompt, dtype=np.int32),
        response_ids=np.arange(length, dtype=np.int32),
        response_mask=np.array([1] * len(versions) + [0], dtype=np.uint8),
        response_logprobs=np.array([-0.5] * len(versions) + [0.0], dtype=np.float32),
        version_spans=np.array([[v, i, i + 1] for i, v in enumerate(versions)], dtype=np.int32).reshape(-1, 3),
        turn_starts=np.array([0], dtype=np.int32),
    )


def trajectory(lease: Lease, version: int | None = None, reward: float | None = 1.0, tokens: int = 2) -> Trajectory:
    sampled = [lease.min_version if version is None else version] * tokens
    outcome = COMPLETED if reward is not None else Outcome(OutcomeKind.TRUNCATED, "deadline")
    return Trajectory(
        lease.episode_id,
        lease.task.task_id,
        [segment(sampled)],
        reward,
        outcome,
        num_turns=1,
        metrics={"tool_calls": 1},
    )


def turn(number: int) -> JournalEntry:
    return JournalEntry(
        JournalKind.SAMPLED,
        context_len=number,
        context_hash=2**64 - 1 - number,
        ids=np.array([number, number + 1], dtype=np.int32),
        logprobs=np.array([-1.0, -2.0], dtype=np.float32),
        version_spans=np.array([[0, 0, 2]], dtype=np.int32),
        data={"finish_reason": "stop"},
    )


def at(index: int, epoch: int = 0) -> DataCursor:
    return DataCursor(epoch, index)


async def finish_all(queue: TransferQueue, count: int = 100, version: int = 0) -> list[str]:
    """Lease and complete everything that may run; returns the episodes."""
    leases = await queue.lease_episodes("worker", count, version)
    for lease in leases:
        await queue.complete(lease, trajectory(lease))
    return [lease.episode_id for lease in leases]


async def train(queue: TransferQueue, step: int) -> Batch:
    batch = await queue.lease_batch(step)
    assert isinstance(batch, Batch), batch
    assert await queue.publish_version(Announcement(step + 1, {"path": f"v{step + 1}"}))
    return batch
