"""A server's entry in the registry: kept, renewed at each change, and gone once it has left."""

from __future__ import annotations

import asyncio

from tests.rollout_server.conftest import StubQueue

from penstock.rollout_server import QueueConnection, Registration
from penstock.transfer_queue import ServerInfo


class SlowQueue(StubQueue):
    """A heartbeat arrives only when `let` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.let, self.sent = asyncio.Event(), asyncio.Event()

    async def heartbeat(self, server: ServerInfo) -> None:
        self.sent.set()
        await self.let.wait()
        await super().heartbeat(server)


async def test_a_heartbeat_under_way_does_not_bring_back_who_left() -> None:
    queue, going = SlowQueue(), False
    registration = Registration(QueueConnection(queue), lambda: None if going else ServerInfo("s", "http://s", 1))
    keeping = asyncio.create_task(registration.keep())
    await asyncio.wait_for(queue.sent.wait(), 60)
    going = True
    leaving = asyncio.create_task(registration.leave("s"))
    await asyncio.sleep(0.05)
    queue.let.set()
    await leaving
    assert queue.registered == {}
    registration.changed.set()
    await asyncio.sleep(0.05)
    assert queue.registered == {}
    assert len(queue.heartbeats) == 1
    keeping.cancel()


async def test_a_queue_that_is_away_is_told_later() -> None:
    queue = StubQueue()
    line = QueueConnection(queue)
    registration = Registration(line, lambda: ServerInfo("s", "http://s", 1))
    queue.down = True
    keeping = asyncio.create_task(registration.keep())
    await asyncio.sleep(0.05)
    assert line.error == "the stub is down"
    queue.down = False
    registration.changed.set()
    await asyncio.sleep(0.05)
    assert list(queue.registered) == ["s"]
    assert line.error is None
    keeping.cancel()
