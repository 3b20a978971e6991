"""A server's entry in the registry: kept, renewed at each change, and gone once it has left."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest
from tests.faulty_queue import FaultyQueue
from tests.until import until

from penstock.rollout_server import EngineError, EngineInfo
from penstock.rollout_server.server.registration import BuildCheck, QueueConnection, Registration, build_of
from penstock.transfer_queue import QueueUnavailable, ServerInfo


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


class ScheduledQueue(FaultyQueue):
    """Lets the calls of `a` and `b` through in the order of `schedule`; those after its end at once."""

    def __init__(self, schedule: Sequence[str]) -> None:
        super().__init__()
        self.schedule = list(schedule)
        self._moved = asyncio.Condition()

    async def turn(self, name: str) -> None:
        async with self._moved, asyncio.timeout(60.0):
            await self._moved.wait_for(lambda: name not in self.schedule or self.schedule[0] == name)
            if name in self.schedule:
                self.schedule.pop(0)
            self._moved.notify_all()

    async def skip(self, name: str) -> None:
        """It makes no calls any more."""
        async with self._moved:
            self.schedule = [other for other in self.schedule if other != name]
            self._moved.notify_all()


class OneOf:
    """The queue as the server `name` calls it."""

    def __init__(self, queue: ScheduledQueue, name: str) -> None:
        self._queue, self._name = queue, name

    async def servers(self) -> list[ServerInfo]:
        await self._queue.turn(self._name)
        if self._queue.down:
            raise QueueUnavailable("the queue is down")
        return await self._queue.servers()

    async def heartbeat(self, server: ServerInfo) -> None:
        await self._queue.turn(self._name)
        await self._queue.heartbeat(server)

    async def deregister(self, server_id: str) -> None:
        await self._queue.turn(self._name)
        await self._queue.deregister(server_id)


class Joining:
    """A server from its first look at the others to its first heartbeat as an open one, or its refusal."""

    def __init__(self, queue: ScheduledQueue, name: str, build: str) -> None:
        self.open, self.refusal, self._registered = False, "", False
        connection = QueueConnection(OneOf(queue, name))  # type: ignore[arg-type]
        info = EngineInfo(name="fake", engine_version=build, version=0, vocab_size=8, max_model_len=8)
        entry = ServerInfo(name, f"http://{name}", 0, engine=build_of(info))
        self._queue, self._name, self._info = queue, name, info
        self._registration = Registration(
            connection, lambda: replace(entry, accepting=self.open) if self._registered else None
        )
        self._build = BuildCheck(connection, name)

    async def run(self) -> None:
        try:
            await self._build.compare(self._info, self._announce)
            self.open = True
            await self._announce()
        except EngineError as error:
            self.refusal, self._registered = str(error), False
            await self._registration.leave(self._name)
        finally:
            await self._queue.skip(self._name)

    async def _announce(self) -> None:
        self._registered = True
        await self._registration.announce()


async def join_together(order: str, *builds: str) -> tuple[ScheduledQueue, Joining, Joining]:
    """Servers `a` and `b` of these builds, once each has opened or was refused; their calls come in `order`."""
    queue = ScheduledQueue(order)
    a, b = (Joining(queue, name, build) for name, build in zip("ab", builds, strict=True))
    await asyncio.wait_for(asyncio.gather(a.run(), b.run()), 30.0)
    return queue, a, b


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.rollout_server.server.registration.LOOK_AGAIN_S", 0.001)
    monkeypatch.setattr("penstock.rollout_server.server.registration.UNDECIDED_S", 100.0)


ORDERS = sorted({"".join(order) for order in permutations("aaabbb")})
"""Of three calls each: a look, the entry, another look."""


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("order", ORDERS)
async def test_of_two_that_register_together_both_open_only_if_they_are_of_one_build(order: str) -> None:
    _, a, b = await join_together(order, "1", "1")
    assert (a.open, b.open) == (True, True)
    queue, a, b = await join_together(order, "1", "2")
    assert a.open != b.open
    refused, stays = (b, "a") if a.open else (a, "b")
    assert f"{stays} at http://{stays} has fake" in refused.refusal
    assert [server.server_id for server in await queue.servers()] == [stays], "who gives way leaves the registry"


@pytest.mark.usefixtures("impatient")
async def test_who_waits_for_a_silent_rival_gives_way_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be open, and its heartbeat late; nor does a queue that is away meanwhile let anybody in."""
    monkeypatch.setattr("penstock.rollout_server.server.registration.UNDECIDED_S", 0.2)
    queue = ScheduledQueue("aaba")
    a = Joining(queue, "a", "1")
    joining = asyncio.create_task(a.run())
    await OneOf(queue, "b").heartbeat(ServerInfo("b", "http://b", 0, accepting=False, engine="fake 2"))
    await until(lambda: not queue.schedule)
    queue.down = True
    await joining
    assert not a.open
    assert "b at http://b has fake 2" in a.refusal
