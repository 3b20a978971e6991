"""The connection on a real Redis Cluster of three nodes: spread, redirected, one node killed in the middle."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from redis.crc import key_slot
from redis_cluster import RedisCluster
from redis_parts import PASSWORD, make_certificates, nothing_left_open, open_to, small_scripts  # noqa: F401 - a fixture

from penstock.transfer_queue import QueueError, QueueUnavailable, RedisServer
from penstock.transfer_queue.redis import Connection

pytestmark = [pytest.mark.redis, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RedisCluster]:
    async with RedisCluster(tmp_path_factory.mktemp("cluster"), PASSWORD) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def connection(cluster: RedisCluster) -> AsyncIterator[Connection]:
    made = await open_to(cluster.url)
    yield made
    await made.close()


@pytest.fixture
def run() -> str:
    """Names keys that no other test has."""
    return secrets.token_hex(4)


async def owner(cluster: RedisCluster, slot: int) -> RedisServer:
    for first, last, master, *_ in await cluster.ask(cluster.servers[0], "CLUSTER SLOTS"):
        if first <= slot <= last:
            return next(server for server in cluster.servers if server.port == master[1])
    raise AssertionError(slot)


async def test_many_go_to_the_nodes_of_their_keys(connection: Connection, cluster: RedisCluster, run: str) -> None:
    assert connection.spreads is True
    keys = [f"{run}:{number}" for number in range(300)]
    assert await connection.many([("SET", key, key) for key in keys]) == [True] * 300
    assert await connection.many([("GET", key) for key in keys]) == [key.encode() for key in keys]
    sizes = [await cluster.ask(server, "DBSIZE") for server in cluster.servers]
    assert min(sizes) > 50
    chunks = [chunk async for chunk in connection.scan(f"{run}:*")]
    assert {key.decode() for chunk in chunks for key in chunk} == set(keys)


async def test_the_map_of_slots_is_asked_for_once(connection: Connection, cluster: RedisCluster, run: str) -> None:
    await connection.command("SET", run, "1")
    for server in cluster.servers:
        await cluster.ask(server, "CONFIG RESETSTAT")
    for number in range(20):
        await connection.command("SET", f"{run}:{number}", "1")
    said = [await cluster.ask(server, "INFO commandstats") for server in cluster.servers]
    assert sum("cmdstat_set" in str(one) for one in said) > 1
    assert not any("cluster|slots" in str(one) for one in said)


async def test_each_command_goes_where_its_key_is(connection: Connection, cluster: RedisCluster, run: str) -> None:
    """Whichever argument that is: no node sends it on."""
    keys = [f"{run}:{number}" for number in range(20)]
    await connection.many([("SET", key, "x") for key in keys])
    source = "return redis.call('GET', KEYS[1])"
    (sha,) = {await cluster.ask(server, "SCRIPT", "LOAD", source) for server in cluster.servers}
    await connection.script("echo", run)  # loads the functions
    for server in cluster.servers:
        await cluster.ask(server, "CONFIG", "RESETSTAT")
    for key in keys:
        assert await connection.script("echo", key, "y") == [[key.encode()], [b"y"]]
        assert await connection.many([("EVAL", source, 1, key), ("EVALSHA", sha, 1, key)]) == [b"x", b"x"]
    for server in cluster.servers:
        assert "errorstat_MOVED" not in await cluster.ask(server, "INFO", "errorstats")


async def test_close_closes_the_connections_to_all_nodes(cluster: RedisCluster, run: str) -> None:
    with nothing_left_open():
        closed = await open_to(cluster.url)
        assert await closed.many([("SET", f"{run}:{number}", "x") for number in range(60)]) == [True] * 60
        await closed.close()
        del closed


async def test_a_slot_without_a_node_is_named(tmp_path: Path) -> None:
    """A node that no slot was given to yet."""
    cluster = RedisCluster(tmp_path, PASSWORD, nodes=1)
    (node,) = cluster.servers
    async with node:
        connection = await open_to(node.url)
        connection._deadline_s = 5.0
        with pytest.raises(QueueUnavailable, match="CLUSTERDOWN no node holds the slot"):
            await connection.command("GET", "a")
        await connection.close()
        cluster._start_timeout_s = 6.0
        with pytest.raises(QueueError, match=rf"{node.url}: its cluster is not whole.*cluster_state:fail"):
            await cluster.until_ok()


async def test_a_script_runs_where_its_key_is(connection: Connection, run: str) -> None:
    keys = [f"{{{run}}}:a", f"{{{run}}}:b"]
    answer = await connection.script("echo", keys[0], "x", keys=keys[1:])
    assert answer == [[key.encode() for key in keys], [b"x"]]
    with pytest.raises(QueueError, match=r"CROSSSLOT|same slot"):
        await connection.script("echo", f"{run}-1", keys=[f"{run}-2"])


async def test_writes_are_acknowledged_before_the_script(connection: Connection, run: str) -> None:
    writes = [("SET", f"{run}:{number}", 1) for number in range(20)]
    writes.append(("SET", f"{{{run}}}:p", b"xyz"))
    answer = await connection.write_and_run(writes, "weigh", f"{{{run}}}:h", keys=[f"{{{run}}}:p"])
    assert answer == [3, 1]
    assert await connection.many([("EXISTS", f"{run}:{number}") for number in range(20)]) == [1] * 20


async def test_a_script_does_not_run_before_its_writes_are_taken(
    connection: Connection, cluster: RedisCluster, run: str
) -> None:
    """The payload's node has no memory left; the index's node has."""
    payload, index = f"{run}:payload", f"{{{run}x}}:index"
    poor = await owner(cluster, key_slot(payload.encode()))
    number = 0
    while await owner(cluster, key_slot(index.encode())) is poor:
        number += 1
        index = f"{{{run}x{number}}}:index"
    await cluster.ask(poor, "CONFIG", "SET", "maxmemory", 1)
    call = asyncio.create_task(connection.write_and_run([("SET", payload, 1)], "grow", index))
    await until_counted(cluster, poor, "errorstat_OOM")
    assert await connection.command("EXISTS", index) == 0
    await cluster.ask(poor, "CONFIG", "SET", "maxmemory", 0)
    assert await call == 1


async def test_info_is_of_the_whole(connection: Connection, cluster: RedisCluster) -> None:
    infos = await connection.infos()
    assert {info["tcp_port"] for info in infos} == {server.port for server in cluster.servers}
    assert (await connection.info())["used_memory"] > max(info["used_memory"] for info in infos)
    assert len(await connection.command("TIME")) == 2, "`penstock doctor` asks any node"


async def test_one_node_that_evicts_is_named(cluster: RedisCluster) -> None:
    bad = cluster.servers[2]
    await cluster.ask(bad, "CONFIG", "SET", "maxmemory-policy", "volatile-lru")
    with pytest.raises(QueueError, match=rf"its node on port {bad.port}\) evicts keys when full"):
        await open_to(cluster.url)
    await cluster.ask(bad, "CONFIG", "SET", "maxmemory-policy", "noeviction")


async def test_a_slot_that_moves_is_followed(connection: Connection, cluster: RedisCluster, run: str) -> None:
    """ASK for keys that have gone, TRYAGAIN for scripts on keys of which some have gone, MOVED when all is done."""
    keys = [f"{{{run}}}:{number}" for number in range(4)]
    await connection.many([("SET", key, key) for key in keys])
    slot = key_slot(keys[0].encode())
    source = await owner(cluster, slot)
    target = next(server for server in cluster.servers if server is not source)
    names = [(await cluster.ask(server, "CLUSTER", "MYID")).decode() for server in (source, target)]
    await cluster.ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", names[0])
    await cluster.ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", names[1])
    await migrate(cluster, source, target, keys[:2])
    assert await connection.many([("GET", key) for key in keys]) == [key.encode() for key in keys]
    assert await connection.command("SET", f"{{{run}}}:new", 1) is True
    split = asyncio.create_task(connection.script("echo", keys[0], keys=keys[1:]))
    await until_counted(cluster, source, "errorstat_TRYAGAIN")
    assert not split.done()
    await migrate(cluster, source, target, keys[2:])
    for server in (target, source):
        await cluster.ask(server, "CLUSTER", "SETSLOT", slot, "NODE", names[1])
    assert await split == [[key.encode() for key in keys], []]
    assert await connection.many([("GET", key) for key in keys]) == [key.encode() for key in keys]
    assert await owner(cluster, slot) is target
    await cluster.ask(source, "CONFIG", "RESETSTAT")
    assert await connection.many([("GET", key) for key in keys]) == [key.encode() for key in keys]
    assert "errorstat_MOVED" not in await cluster.ask(source, "INFO", "errorstats"), "the new owner is known"


@pytest.mark.crash
async def test_a_node_killed_in_the_middle_is_waited_for(
    connection: Connection, cluster: RedisCluster, run: str
) -> None:
    """Every increment arrives at least once; at living nodes exactly once, although the calls were retried."""
    keys = [f"{run}:{number}" for number in range(200)]
    dead = cluster.servers[1]
    theirs = {key for key in keys if await owner(cluster, key_slot(key.encode())) is dead}
    impatient = await open_to(cluster.url)
    impatient._deadline_s = 2.0
    await connection.many([("SET", key, 0) for key in keys])
    await dead.kill()
    calls = [asyncio.create_task(connection.many([("INCR", key) for key in keys])) for _ in range(10)]
    with pytest.raises(QueueUnavailable, match=r"GET: no answer from redis://.* for \d+\.\d s"):
        await impatient.command("GET", next(iter(theirs)))
    assert not any(call.done() for call in calls)
    await dead.restart()
    await asyncio.gather(*calls)
    await cluster.until_ok()
    counts = dict(zip(keys, await connection.many([("GET", key) for key in keys]), strict=True))
    assert {int(counts[key]) for key in keys if key not in theirs} == {10}
    assert min(int(counts[key]) for key in theirs) >= 10
    await impatient.close()


@pytest.mark.crash
async def test_a_replica_takes_over(tmp_path: Path) -> None:
    async with RedisCluster(tmp_path, PASSWORD) as cluster:
        connection = await open_to(cluster.url, deadline_s=60)
        slot = key_slot(b"kept")
        master = await owner(cluster, slot)
        replica = await add_replica(cluster, master, tmp_path / "replica")
        await connection.command("SET", "kept", 1)
        assert await cluster.ask(master, "WAIT", 1, 60_000) == 1
        await master.kill()
        assert await connection.command("INCR", "kept") == 2
        cluster.servers.remove(master)
        assert await owner(cluster, slot) is replica
        await connection.close()
        await master.stop()


async def add_replica(cluster: RedisCluster, master: RedisServer, directory: Path) -> RedisServer:
    replica = RedisServer(directory, PASSWORD, cluster=True)
    cluster.servers.append(replica)
    await replica.start()
    await cluster.ask(replica, "CLUSTER", "MEET", "127.0.0.1", master.port)
    await cluster.until_ok()
    await cluster.ask(replica, "CLUSTER", "REPLICATE", await cluster.ask(master, "CLUSTER", "MYID"))
    async with asyncio.timeout(60):
        while (await cluster.ask(replica, "INFO", "replication")).get("master_link_status") != "up":
            await asyncio.sleep(0.05)
    return replica


async def migrate(cluster: RedisCluster, source: RedisServer, target: RedisServer, keys: list[str]) -> None:
    moving = ("MIGRATE", "127.0.0.1", target.port, "", 0, 60_000, "AUTH", PASSWORD, "KEYS", *keys)
    assert await cluster.ask(source, *moving) == b"OK"


async def until_counted(cluster: RedisCluster, server: RedisServer, error: str) -> None:
    """Wait until a server has refused a command for that reason."""
    async with asyncio.timeout(60):
        while error not in await cluster.ask(server, "INFO", "errorstats"):
            await asyncio.sleep(0.01)


async def test_a_cluster_without_one_of_its_nodes_does_not_start(tmp_path: Path) -> None:
    """The second node's directory is taken. The first, which is up by then, is stopped; the taken one is not ours."""
    cluster = RedisCluster(tmp_path, PASSWORD)
    async with RedisServer(tmp_path / "node-1", PASSWORD) as other:
        with pytest.raises(QueueError, match=r"node-1.*another redis-server of ours"):
            await cluster.start()
        assert [server.alive for server in cluster.servers] == [False] * 3
        assert other.alive


async def test_a_login_that_may_not_see_the_slots_is_refused(cluster: RedisCluster) -> None:
    for server in cluster.servers:
        await cluster.ask(server, "ACL", "SETUSER", "blind", "on", f">{PASSWORD}", "~*", "+@all", "-cluster")
    with pytest.raises(QueueError, match=r"no permissions .*cluster\|slots"):
        await Connection.connect(cluster.url, deadline_s=120, username="blind", password=PASSWORD)
    for server in cluster.servers:
        await cluster.ask(server, "ACL", "DELUSER", "blind")


async def test_tls(tmp_path: Path) -> None:
    async with RedisCluster(tmp_path / "nodes", PASSWORD, **make_certificates(tmp_path)) as cluster:
        connection = await open_to(cluster.url)
        keys = [f"k{number}" for number in range(30)]
        assert await connection.many([("SET", key, 1) for key in keys]) == [True] * 30
        await connection.close()
