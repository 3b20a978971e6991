from __future__ import annotations

import pytest

from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import Limits


@pytest.fixture
async def queue() -> MemoryTransferQueue:
    made = MemoryTransferQueue()
    await made.create_run(Limits(group_size=2, groups_per_step=1, max_staleness=1), "x")
    return made
