"""A redis-server for the folder's tests, and the two ledgers that one suite holds to the protocol."""

from __future__ import annotations

import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from penstock.transfer_queue.batch_log import BatchLog
from penstock.transfer_queue.config import TransferQueueConfig
from penstock.transfer_queue.ledger import Ledger, Limits
from penstock.transfer_queue.memory import MemoryLedger
from penstock.transfer_queue.redis_cluster import RedisCluster
from penstock.transfer_queue.redis_ledger import RedisLedger
from penstock.transfer_queue.redis_server import RedisServer

sys.path.insert(0, str(Path(__file__).parent))  # test files share ledger_samples

PASSWORD = "a-test-password"
CONFIG = TransferQueueConfig(deadline_s=20.0, registry_ttl_s=3.0)

MakeLedger = Callable[[Limits], Awaitable[Ledger]]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def redis_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RedisServer]:
    async with RedisServer(tmp_path_factory.mktemp("redis"), PASSWORD) as server:
        yield server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RedisCluster]:
    async with RedisCluster(tmp_path_factory.mktemp("cluster"), PASSWORD) as cluster:
        yield cluster


@pytest.fixture(params=["memory", *(pytest.param(name, marks=pytest.mark.redis) for name in ("redis", "cluster"))])
def store(request: pytest.FixtureRequest) -> RedisServer | RedisCluster | None:
    """None stands for memory."""
    fixtures = {"redis": "redis_server", "cluster": "redis_cluster"}
    return request.getfixturevalue(fixtures[request.param]) if request.param in fixtures else None


@pytest.fixture
async def make_ledger(store: RedisServer | RedisCluster | None, tmp_path: Path) -> AsyncIterator[MakeLedger]:
    """Makes a new run with the given limits; the run is dropped afterwards."""
    made: list[Ledger] = []

    async def make(limits: Limits) -> Ledger:
        ledger: Ledger
        run = f"t-{secrets.token_hex(4)}"
        log = BatchLog(tmp_path / run)
        if store is None:
            ledger = MemoryLedger(registry_ttl_s=CONFIG.registry_ttl_s, batch_log=log)
        else:
            ledger = await RedisLedger.connect(store.url, run, CONFIG, PASSWORD, batch_log=log)
        made.append(ledger)
        await ledger.create_run(limits, "config: 1")
        return ledger

    yield make
    for ledger in made:
        await ledger.drop_run()
        await ledger.close()
