"""The queue in one process's memory: same answers as Redis, nothing survives. For unit tests and as the model that
the Redis queue is tested against."""

from __future__ import annotations

from penstock.transfer_queue.memory_episodes import MemoryEpisodes
from penstock.transfer_queue.memory_steps import MemorySteps
from penstock.transfer_queue.memory_watching import MemoryWatching


class MemoryTransferQueue(MemoryEpisodes, MemorySteps, MemoryWatching):
    """`TransferQueue` in memory. `clock` (seconds) is the queue's own time, for tests of leases."""
