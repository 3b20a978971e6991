"""What `TransferQueue` promises of a commit: bounded pieces in Redis, and a client may die between any two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from queue_samples import LIMITS, at, finish_all, tasks, train, trajectory

from penstock.transfer_queue import (
    Announcement,
    Batch,
    Limits,
    RedisTransferQueue,
    Status,
    StepError,
    TransferQueue,
    Waiting,
)

CHUNK = 4
"""Episodes that one script forgets, here: two groups."""


class Killed(Exception):
    """The client died."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.transfer_queue.redis.queue.FORGET_CHUNK", CHUNK)


async def commit_and_die(
    queue: TransferQueue, step: int, batches: Mapping[int, Sequence[Sequence[str]]] | None, pieces: int
) -> bool:
    """Commit, by a client that dies after so many pieces; False where it was done before. In memory there are none."""
    if not isinstance(queue, RedisTransferQueue):
        await queue.commit(step, batches)
        return False
    script, left = queue._script, pieces

    async def dying(name: str, *args: object) -> object:
        nonlocal left
        if name == "forget_committed":
            if left == 0:
                raise Killed
            left -= 1
        return await script(name, *args)

    queue._script = dying  # type: ignore[method-assign]
    try:
        await queue.commit(step, batches)
    except Killed:
        return True
    finally:
        queue._script = script  # type: ignore[method-assign]
    return False


def check_accounts(status: Status, held: set[str]) -> None:
    groups, episodes = status.groups, status.episodes
    assert groups["submitted"] == sum(count for name, count in groups.items() if name != "submitted"), groups
    reasons = sum(episodes[name] for name in ("committed", "dropped", "filtered", "unrewarded", "group_failed"))
    assert episodes["completed"] == reasons + len(held), episodes


async def two_trained_steps(queue: TransferQueue) -> None:
    """Of six groups of two episodes each; and one more group is ready."""
    await queue.submit(tasks(13), cursor=at(13))
    for step in (0, 1):
        while isinstance(await queue.lease_batch(step), Waiting):
            await finish_all(queue, 2, version=step)
        await train(queue, step)
    await finish_all(queue, 2, version=2)


SIX = Limits(group_size=2, groups_per_step=6, max_staleness=1, lease_ttl_s=30.0)


@pytest.mark.parametrize("pieces", range(7))
async def test_commit_goes_on_after_a_kill(make_queue, pieces: int) -> None:
    queue = await make_queue(SIX)
    await two_trained_steps(queue)
    died = await commit_and_die(queue, 2, None, pieces)
    assert died == (isinstance(queue, RedisTransferQueue) and pieces < 6)
    status = await queue.status()
    check_accounts(status, await queue.held())
    assert status.committed_step == 2  # decided, also where it is not yet forgotten
    assert await queue.rewind(2) == 0
    for step in (0, 1):
        with pytest.raises(StepError):
            await queue.rewind(step)
        with pytest.raises(StepError):
            await queue.lease_batch(step)
    await queue.commit(2)
    status = await queue.status()
    check_accounts(status, await queue.held())
    assert (status.groups["committed"], status.groups["trained"]) == (12, 0)
    assert (status.episodes["trained"], status.episodes["committed"]) == (24, 24)
    assert status.groups["ready"] == 1


@pytest.mark.parametrize("pieces", range(5))
async def test_a_later_commit_finishes_an_earlier_one(make_queue, pieces: int) -> None:
    queue = await make_queue(SIX)
    await two_trained_steps(queue)
    await commit_and_die(queue, 1, None, pieces)
    await queue.commit(2)
    status = await queue.status()
    assert (status.groups["committed"], status.episodes["trained"], status.episodes["committed"]) == (12, 24, 24)
    check_accounts(status, await queue.held())


@pytest.mark.parametrize("pieces", range(5))
async def test_a_version_out_amid_a_commit_counts_once(make_queue, pieces: int) -> None:
    queue = await make_queue(SIX)
    await queue.submit(tasks(6), cursor=at(6))
    await finish_all(queue)
    await queue.lease_batch(0)
    await commit_and_die(queue, 1, None, pieces)
    assert await queue.publish_version(Announcement(1, {}))
    await queue.commit(1)
    status = await queue.status()
    assert (status.episodes["trained"], status.episodes["committed"]) == (12, 12)
    assert (status.bytes, status.unconsumed_bytes) == (0, 0)


@pytest.mark.parametrize("pieces", range(5))
async def test_catching_up_goes_on_after_a_kill(make_queue, pieces: int) -> None:
    """Step 1 was lost here: of its groups one runs, one is ready, one is unknown. Step 0 is fixed, not published."""
    queue = await make_queue(LIMITS)
    await queue.submit(tasks(4), cursor=at(4))
    _, *rest = await queue.lease_episodes("worker", 8, 0)
    for lease in rest:
        await queue.complete(lease, trajectory(lease))
    fixed = await queue.lease_batch(0)
    lost = [[f"train/{number:04d}#0", f"train/{number:04d}#1"] for number in (0, 3, 7)]
    await commit_and_die(queue, 2, {0: fixed.groups, 1: lost}, pieces)
    check_accounts(await queue.status(), await queue.held())
    await queue.commit(2, {0: fixed.groups, 1: lost})
    status = await queue.status()
    check_accounts(status, await queue.held())
    assert (status.version, status.step, status.committed_step) == (2, 2, 2)
    assert (status.groups["committed"], status.episodes["trained"], status.episodes["committed"]) == (5, 10, 10)
    assert (status.bytes, status.unconsumed_bytes, status.workers) == (0, 0, {})
    assert await queue.submit(tasks(4, start=4), cursor=at(8)) == 3  # train/0007 is trained already


@pytest.mark.redis
@pytest.mark.parametrize("store", ["redis", "cluster"], indirect=True)
async def test_one_script_forgets_a_bounded_share(make_queue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = await make_queue(SIX)
    await two_trained_steps(queue)
    pattern = queue._keys.index.replace("{", "\\{") + "group:*"
    script = queue._script

    async def groups() -> int:
        return sum([len(chunk) async for chunk in queue._connection.scan(pattern)])

    async def counted(name: str, *args: object) -> object:
        if name == "forget_committed":
            assert await queue._connection.command("SCARD", queue._keys.garbage) == 0, "each piece is swept by itself"
        answer = await script(name, *args)
        left.append(await groups())
        return answer

    left = [await groups()]

    monkeypatch.setattr(queue, "_script", counted)
    await queue.commit(2)
    assert left[0] - left[-1] == 12
    assert max(before - after for before, after in pairwise(left)) == CHUNK // LIMITS.group_size


@pytest.mark.parametrize("pieces", [0, 3])
async def test_a_commit_of_lost_steps_that_was_cut_off_is_continued(make_queue, pieces: int) -> None:
    """A trainer dies while what its checkpoint holds is forgotten. Its next life reads that these steps are committed,
    and names only those beyond."""
    queue = await make_queue(SIX)
    await queue.submit(tasks(12), cursor=at(12))
    held = {
        step: [[f"train/{6 * step + g:04}#{m}" for m in range(SIX.group_size)] for g in range(6)] for step in (0, 1)
    }
    await commit_and_die(queue, 2, held, pieces)
    assert (await queue.status()).committed_step == 2
    await queue.commit(2, {})
    status = await queue.status()
    assert (status.step, status.version, status.committed_step) == (2, 2, 2)
    assert status.groups["committed"] == status.groups["submitted"] == 12


async def test_a_queue_that_caught_up_waits_for_no_ended_group(make_queue) -> None:
    """Two groups are due at step 1, which has one place: the other step that they were admitted for is in the
    checkpoint already, with groups that this queue has lost. Nothing runs, so nothing is worth a wait."""
    queue = await make_queue(replace(LIMITS, group_size=1, groups_per_step=1, max_staleness=1))
    await queue.submit(tasks(2), cursor=at(2))
    first, second = await finish_all(queue)
    await queue.commit(1, {0: [["train/0009#0"]]})
    assert await queue.lease_batch(1) == Batch(1, [[first]])
    assert await queue.publish_version(Announcement(2, {}))
    assert isinstance(await queue.lease_batch(2), Waiting)
    assert (await queue.status()).groups["dropped_over_age"] == 1
    assert await queue.held() == {first}, f"{second} is over age"
