from __future__ import annotations

import pytest

from penstock.transfer_queue.ledger import Limits
from penstock.transfer_queue.memory import MemoryLedger


@pytest.fixture
async def ledger() -> MemoryLedger:
    made = MemoryLedger()
    await made.create_run(Limits(group_size=2, groups_per_step=1, max_staleness=1), "x")
    return made
