"""The ledger in one process's memory: same answers as Redis, nothing survives. For unit tests and as the model that
the Redis ledger is tested against."""

from __future__ import annotations

from penstock.transfer_queue.memory_episodes import MemoryEpisodes
from penstock.transfer_queue.memory_steps import MemorySteps
from penstock.transfer_queue.memory_watching import MemoryWatching


class MemoryLedger(MemoryEpisodes, MemorySteps, MemoryWatching):
    """`Ledger` in memory. `clock` (seconds) is the ledger's own time, for tests of leases."""
