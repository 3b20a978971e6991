"""What `TransferQueue` promises of journals: entries have positions, without holes, each written once."""

from __future__ import annotations

import numpy as np
import pytest
from queue_samples import LIMITS, at, tasks, turn

from penstock.transfer_queue import JournalMismatch, Lease, TransferQueue


async def one_lease(queue: TransferQueue) -> Lease:
    await queue.submit(tasks(1), cursor=at(1))
    (lease,) = await queue.lease_episodes("worker", 1, 0)
    return lease


async def kept(queue: TransferQueue, lease: Lease) -> list[int]:
    return [entry.context_len for entry in (await queue.adopt(lease.episode_id, lease.fence)).journal]


async def test_journal_refuses_an_entry_after_a_hole(make_queue) -> None:
    queue = await make_queue(LIMITS)
    lease = await one_lease(queue)
    with pytest.raises(JournalMismatch, match="train/0000#0: journal entry 2: the journal has 0 entries"):
        await queue.journal(lease, turn(2), 2)
    await queue.journal(lease, turn(0), 0)
    with pytest.raises(JournalMismatch, match="train/0000#0: journal entry 3") as caught:
        await queue.journal(lease, turn(3), 3)
    assert caught.value.kept == 1
    assert await kept(queue, lease) == [0]
    for number in (1, 2, 3):
        await queue.journal(lease, turn(number), number)
    assert await kept(queue, lease) == [0, 1, 2, 3]


async def test_journal_entry_is_appended_once(make_queue) -> None:
    queue = await make_queue(LIMITS)
    lease = await one_lease(queue)
    for number in (0, 1):
        await queue.journal(lease, turn(number), number)
    size = (await queue.status()).unconsumed_bytes
    for number in (1, 0):
        await queue.journal(lease, turn(number), number)
    assert (await queue.status()).unconsumed_bytes == size
    assert await kept(queue, lease) == [0, 1]
    again = await queue.adopt(lease.episode_id, lease.fence)
    np.testing.assert_array_equal(again.journal[1].ids, turn(1).ids)


async def test_journal_tells_a_second_writer_its_place(make_queue) -> None:
    """Two servers may serve one episode with one fence."""
    queue = await make_queue(LIMITS)
    lease = await one_lease(queue)
    await queue.journal(lease, turn(0), 0)
    with pytest.raises(JournalMismatch) as caught:
        await queue.journal(lease, turn(7), 0)
    assert await kept(queue, lease) == [0]
    await queue.journal(lease, turn(7), caught.value.kept)
    assert await kept(queue, lease) == [0, 7]
