"""Reports of a rollout server name every token and every second of its requests once, by episode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.rollout_server.server.registration import QueueConnection
from penstock.rollout_server.server.usage import ServerUsage
from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import QueueError, UsageReport


class FailingQueue(MemoryTransferQueue):
    """Fails `failures` times; the first time after it has taken the report, as where the reply is lost."""

    failures = 0

    async def report_usage(self, usage: UsageReport) -> None:
        if self.failures != 1:
            await super().report_usage(usage)
        if self.failures:
            self.failures -= 1
            raise QueueError("away")


@pytest.fixture
def queue() -> FailingQueue:
    return FailingQueue()


@pytest.fixture
def seconds() -> list[float]:
    """Device seconds of the next counts."""
    return []


@pytest.fixture
def usage(queue: FailingQueue, seconds: list[float], monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerUsage]:
    server = ServerUsage("rollout-0", QueueConnection(queue), lambda: True)
    monkeypatch.setattr(server._clock, "elapsed_s", lambda: seconds.pop(0))
    yield server
    assert not seconds


async def reported(queue: MemoryTransferQueue) -> list[dict[str, dict[str, float]]]:
    return [
        {name: dict(each) for name, each in entry.usage.amounts.items()}
        for entry in await queue.ledger(0)
        if entry.usage
    ]


async def test_seconds_go_to_those_who_sampled_then_to_those_who_run_then_to_nobody(
    usage: ServerUsage, queue: MemoryTransferQueue, seconds: list[float]
) -> None:
    seconds += [4.0, 2.0, 1.0]
    for episode in ("train/0#0", "train/0#1", "train/0#1"):
        usage.begin(episode)
    usage.sampled("train/0#0", 3)
    usage.sampled("train/0#1", 1)
    await usage.report()
    usage.end("train/0#0")
    await usage.report()
    usage.end("train/0#1")
    usage.end("train/0#1")
    await usage.report()
    assert await reported(queue) == [
        {"train/0#0": {"rollout_s": 3.0, "tokens": 3}, "train/0#1": {"rollout_s": 1.0, "tokens": 1}},
        {"train/0#1": {"rollout_s": 2.0}},
        {"idle": {"rollout_s": 1.0}},
    ]


async def test_what_the_queue_did_not_take_is_reported_once(
    usage: ServerUsage, queue: FailingQueue, seconds: list[float]
) -> None:
    seconds += [1.0, 2.0, 4.0]
    queue.failures = 2
    for tokens in (5, 7, 0):
        usage.sampled("train/0#0", tokens)
        await usage.report()
    amounts = [one["train/0#0"] for one in await reported(queue)]
    assert sum(one.get("tokens", 0) for one in amounts) == 12
    assert sum(one["rollout_s"] for one in amounts) == 3.0
    assert [one["idle"] for one in await reported(queue) if "idle" in one] == [{"rollout_s": 4.0}]


async def test_a_server_that_starts_serves_nobody_yet(queue: MemoryTransferQueue) -> None:
    usage = ServerUsage("rollout-0", QueueConnection(queue), lambda: False)
    usage.sampled("", 2)
    await usage.report()
    await usage.report()
    first, second = await reported(queue)
    assert first["others"]["tokens"] == 2
    assert list(second) == ["start and end"]


async def test_devices_that_are_the_trainers_are_not_the_servers(
    queue: MemoryTransferQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep = [True, False]
    usage = ServerUsage("rollout-0", QueueConnection(queue), lambda: False, lambda: asleep.pop(0))
    monkeypatch.setattr(usage._clock, "elapsed_s", lambda: 2.0)
    for _ in range(2):
        await usage.report()
    assert [one["start and end"]["rollout_s"] for one in await reported(queue)] == [0.0, 2.0]
