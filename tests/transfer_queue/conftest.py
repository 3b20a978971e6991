"""A redis-server for the folder's tests, and the two queues that one suite holds to the protocol."""

from __future__ import annotations

import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import Archive, Limits, RedisServer, RedisTransferQueue, TransferQueue

sys.path.insert(0, str(Path(__file__).parent))  # test files share queue_samples, redis_cluster and redis_parts

from queue_samples import LIMITS, archive_of
from redis_cluster import RedisCluster
from redis_parts import CONFIG, PASSWORD

MakeQueue = Callable[[Limits], Awaitable[TransferQueue]]
AnotherClient = Callable[[TransferQueue], Awaitable[TransferQueue]]
ConnectRedis = Callable[..., Awaitable[RedisTransferQueue]]


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
async def make_queue(store: RedisServer | RedisCluster | None, tmp_path: Path) -> AsyncIterator[MakeQueue]:
    """Makes a new run with the given limits; the run is dropped afterwards."""
    made: list[TransferQueue] = []

    async def make(limits: Limits) -> TransferQueue:
        queue: TransferQueue
        run = f"t-{secrets.token_hex(4)}"
        log = Archive(tmp_path / run)
        if store is None:
            queue = MemoryTransferQueue(registry_ttl_s=CONFIG.registry_ttl_s, archive=log)
        else:
            queue = await RedisTransferQueue.connect(store.url, run, CONFIG, PASSWORD, archive=log)
        made.append(queue)
        await queue.create_run(limits, "config: 1")
        return queue

    yield make
    for queue in made:
        await queue.drop_run()
        await queue.close()


@pytest.fixture
async def connect_redis(redis_server: RedisServer) -> AsyncIterator[ConnectRedis]:
    """Connects clients to one run of the redis-server; it is dropped afterwards, and they are closed."""
    made: list[RedisTransferQueue] = []
    own = f"r-{secrets.token_hex(4)}"

    async def connect(url: str = "", run: str = own, log: Path | None = None, **settings: Any) -> RedisTransferQueue:
        config, archive = CONFIG.model_copy(update=settings), None if log is None else Archive(log)
        client = await RedisTransferQueue.connect(url or redis_server.url, run, config, PASSWORD, archive=archive)
        made.append(client)
        return client

    yield connect
    await made[0].drop_run()
    for client in made:
        await client.close()


@pytest.fixture
async def queue(connect_redis: ConnectRedis) -> RedisTransferQueue:
    """A run in Redis."""
    made = await connect_redis()
    await made.create_run(LIMITS, "x")
    return made


@pytest.fixture
async def trainer(queue: RedisTransferQueue, connect_redis: ConnectRedis, tmp_path: Path) -> RedisTransferQueue:
    """A client of `queue`'s run that has a batch log."""
    return await connect_redis(log=tmp_path / "log")


@pytest.fixture
async def another_client(store: RedisServer | RedisCluster | None) -> AsyncIterator[AnotherClient]:
    """A second client of a queue that `make_queue` made, as another process is."""
    made: list[RedisTransferQueue] = []

    async def connect(queue: TransferQueue) -> TransferQueue:
        if isinstance(queue, MemoryTransferQueue):
            return queue.beside()
        assert isinstance(queue, RedisTransferQueue)
        assert store is not None
        own = archive_of(queue)
        log = own and Archive(own.folder)
        made.append(await RedisTransferQueue.connect(store.url, queue._run, CONFIG, PASSWORD, archive=log))
        return made[-1]

    yield connect
    for queue in made:
        await queue.close()
