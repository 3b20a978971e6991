"""A server's entry in the registry: kept, renewed at each change, and gone once it has left."""

from __future__ import annotations

import asyncio

from tests.faulty_queue import FaultyQueue
from tests.until import until

from penstock.rollout_server import QueueConnection, Registration
from penstock.transfer_queue import ServerInfo


async def test_a_heartbeat_under_way_does_not_bring_back_who_left() -> None:
    queue, going = FaultyQueue(), False
    arrive = queue.waits_for["heartbeat"] = asyncio.Event()
    registration = Registration(QueueConnection(queue), lambda: None if going else ServerInfo("s", "http://s", 1))
    keeping = asyncio.create_task(registration.keep())
    await until(lambda: queue.asked == [("heartbeat", "s")])
    going = True
    leaving = asyncio.create_task(registration.leave("s"))
    await asyncio.sleep(0.05)
    arrive.set()
    await leaving
    assert await queue.servers() == []
    registration.changed.set()
    await asyncio.sleep(0.05)
    assert queue.asked == [("heartbeat", "s"), ("deregister", "s")]
    keeping.cancel()


async def test_a_queue_that_is_away_hears_of_the_server_later() -> None:
    queue = FaultyQueue()
    line = QueueConnection(queue)
    registration = Registration(line, lambda: ServerInfo("s", "http://s", 1))
    queue.down = True
    keeping = asyncio.create_task(registration.keep())
    await until(lambda: line.error == "the queue is down")
    queue.down = False
    registration.changed.set()
    await until(lambda: line.error is None)
    assert [server.server_id for server in await queue.servers()] == ["s"]
    keeping.cancel()
