"""Small tasks, trajectories and queues; any trajectory that an engine could make; equality with arrays."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
from hypothesis import strategies as st

from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import (
    COMPLETED,
    Announcement,
    Archive,
    BadPayload,
    Batch,
    DataCursor,
    EpisodeImages,
    JournalEntry,
    JournalKind,
    Lease,
    Limits,
    Outcome,
    OutcomeKind,
    RedisTransferQueue,
    Segment,
    Task,
    Trajectory,
    TransferQueue,
)

INFRA = Outcome(OutcomeKind.INFRA_ERROR, "the box died", "sandbox")
LIMITS = Limits(group_size=2, groups_per_step=2, max_staleness=1, lease_ttl_s=30.0)


def task(number: int, split: str = "train", min_version: int = 0, *, source: str = "sums", **further: Any) -> Task:
    """`further`: fields of the task, such as ``priority``."""
    messages = [{"role": "user", "content": f"{number} + 1"}]
    name = f"{split}/{number:04d}"
    return Task(name, split, messages, source, number + 1, min_version=min_version, **further)


def tasks(count: int, start: int = 0) -> list[Task]:
    return [task(number) for number in range(start, start + count)]


def segment(versions: list[int], prompt: int = 3) -> Segment:
    """One sampled token per version given, then one observed token."""
    sampled = np.arange(len(versions), dtype=np.int32)
    length = len(versions) + 1
    return Segment(
        prompt_ids=np.arange(prompt, dtype=np.int32),
        response_ids=np.arange(length, dtype=np.int32),
        response_mask=np.array([1] * len(versions) + [0], dtype=np.uint8),
        response_logprobs=np.array([-0.5] * len(versions) + [0.0], dtype=np.float32),
        version_spans=np.stack([np.array(versions, dtype=np.int32), sampled, sampled + 1], axis=1),
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


def images_of(*by_segment: list[bytes], elsewhere: bytes | None = None) -> EpisodeImages:
    """Of segments with these images; `elsewhere`: one more in the first segment, which stays in a file."""
    names = [[sha256(image).hexdigest() for image in of_segment] for of_segment in by_segment]
    data = {sha256(image).hexdigest(): image for of_segment in by_segment for image in of_segment}
    urls = {} if elsewhere is None else {sha256(elsewhere).hexdigest(): "file:///pictures/a.png"}
    return EpisodeImages([[*names[0], *urls], *names[1:]], data, urls)


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


def archive_of(queue: TransferQueue) -> Archive | None:
    owner: Any = queue if isinstance(queue, MemoryTransferQueue) else queue._reader  # type: ignore[attr-defined]
    return owner._archive


async def spill(queue: TransferQueue, step: int, episodes: Sequence[str]) -> int:
    """Archive the episodes, then free them in the queue, in a trainer's order."""
    found = []
    for episode in episodes:
        with suppress(BadPayload):
            found += await queue.read([episode])
    archive = archive_of(queue)
    assert archive is not None
    archive.append(step, found)
    return await queue.spill(step, episodes)


async def expire_leases(queue: TransferQueue) -> None:
    """All leases run out at once; the next `lease_episodes` takes them back."""
    if isinstance(queue, MemoryTransferQueue):
        for _, _, member in queue._state.leased():
            member.expires_at = 0.0
        return
    assert isinstance(queue, RedisTransferQueue)
    key = queue._keys.index + "leases"
    for episode in await queue._connection.command("ZRANGE", key, 0, -1):
        await queue._connection.command("ZADD", key, 0, episode)


LEASE = Lease("train/0001#0", task(1), 0, 0, 1, 0)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    """Turns of sampled tokens with observations between them; now and then long enough for several blocks."""
    mask: list[int] = []
    spans, starts, version = [], [], 0
    scale = draw(st.sampled_from([1, 1, 1, 9_000]))
    for sampled, observed in draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=5)):
        starts.append(len(mask))
        if sampled:
            version += draw(st.integers(0, 2))
            spans.append((version, len(mask), len(mask) + sampled * scale))
        mask += [1] * sampled * scale + [0] * observed * scale
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    prompt = draw(st.integers(1, 9)) * scale
    kind = draw(st.sampled_from([None, np.uint8, np.uint16]))
    judged = draw(st.none() | st.just((-rng.random(len(mask)) * np.array(mask)).astype(np.float32)))
    return Segment(
        prompt_ids=rng.integers(0, 2**31, prompt, dtype=np.int32),
        response_ids=rng.integers(0, 2**31, len(mask), dtype=np.int32),
        response_mask=np.array(mask, dtype=np.uint8),
        response_logprobs=(-rng.random(len(mask)) * np.array(mask)).astype(np.float32),
        version_spans=np.array(spans, dtype=np.int32).reshape(-1, 3),
        turn_starts=np.array(starts, dtype=np.int32),
        teacher_logprobs=judged,
        routed_experts=None if kind is None else rng.integers(0, np.iinfo(kind).max, (prompt + len(mask), 3, 2), kind),
        **tops(rng, sum(mask), 0 if judged is None else draw(st.sampled_from([0, 1, 4]))),
    )


def tops(rng: np.random.Generator, sampled: int, k: int) -> dict[str, np.ndarray]:
    """A teacher's k likeliest ids of each sampled token; none where k is 0."""
    if not k:
        return {}
    ids = rng.integers(0, 2**20, (sampled, k), dtype=np.int32) * k + np.arange(k, dtype=np.int32)
    return {"teacher_top_ids": ids, "teacher_top_logprobs": (-np.log(k) - rng.random((sampled, k))).astype(np.float32)}


def with_turn_rewards(sent: Trajectory) -> st.SearchStrategy[Trajectory]:
    turns = sum(one.num_turns for one in sent.segments)
    rewards = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=turns, max_size=turns)
    return (st.just([]) | rewards).map(lambda drawn: replace(sent, turn_rewards=drawn))


trajectories = st.builds(
    Trajectory,
    episode_id=st.just(LEASE.episode_id),
    task_id=st.just(LEASE.task.task_id),
    segments=st.lists(segments(), max_size=3),
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    outcome=st.builds(Outcome, st.just(OutcomeKind.TRUNCATED), st.text()),
    num_turns=st.integers(0, 9),
    metrics=st.dictionaries(st.text(), st.floats(allow_nan=False), max_size=3),
    extra=st.dictionaries(st.text(), plain, max_size=3),
    data_source=st.text(),
).flatmap(with_turn_rewards)


def same(left: object, right: object) -> bool:
    """Equality of dataclasses, maps and lists with arrays in them, dtypes included."""
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if is_dataclass(left):
        return type(left) is type(right) and all(
            same(getattr(left, f.name), getattr(right, f.name)) for f in fields(left)
        )
    if isinstance(left, list):
        return isinstance(right, list) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    return left == right
