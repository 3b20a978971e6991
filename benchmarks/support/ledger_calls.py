"""Every call of the ledger's protocol that the benchmarks make outside of their clocks, and a step's consumption."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.transfer_queue.config import TransferQueueConfig
from penstock.transfer_queue.ledger import Announcement, Batch, Lease, Ledger, LedgerError, Limits
from penstock.transfer_queue.redis_ledger import RedisLedger
from penstock.transfer_queue.trajectory import DataCursor, Task, Trajectory

GROUP_SIZE = 4


async def open_ledger(url: str, password: str, run: str) -> RedisLedger:
    return await RedisLedger.connect(url, run, TransferQueueConfig(), password=password)


def tasks(first: int, count: int) -> list[Task]:
    """Tasks number `first` and on of the training stream, each about 150 bytes packed."""
    return [
        Task(f"train/{number:08d}", "train", [{"role": "user", "content": "?"}], "bench", "0")
        for number in range(first, first + count)
    ]


async def start_run(ledger: Ledger, groups: int) -> None:
    """A run whose step 0 takes `groups` groups, all queued."""
    await ledger.create_run(Limits(GROUP_SIZE, groups, max_staleness=0), "{}")
    await ledger.submit(tasks(0, groups), DataCursor(0, groups))


async def leased_work(ledger: Ledger, worker: str, count: int) -> list[Lease]:
    leases = await ledger.lease_episodes(worker, count, 0)
    if len(leases) != count:
        raise LedgerError(f"{worker} was given {len(leases)} episodes, not {count}")
    return leases


async def consume_step(ledger: Ledger, step: int) -> Sequence[Trajectory]:
    """What a trainer does with a step: its batch, the payloads, the new version, the checkpoint's commit."""
    batch = await ledger.lease_batch(step)
    if not isinstance(batch, Batch):
        raise LedgerError(f"step {step} is not ready: {batch.cause}")
    trajectories = await ledger.read([episode for group in batch.groups for episode in group])
    await ledger.publish_version(Announcement(step + 1, {}))
    await ledger.commit(step + 1)
    return trajectories
