"""Meters of usage: what a queue does not take is reported later, and once."""

from __future__ import annotations

import asyncio

import pytest

from penstock.transfer_queue import QueueError, UsageMeter, UsageReport


class Reports:
    """Answers once it is `open`; refuses each report at first."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self._known: set[str] = set()
        self.taken: dict[str, UsageReport] = {}

    async def send(self, usage: UsageReport) -> None:
        await self.open.wait()
        if usage.report_id not in self._known:
            self._known.add(usage.report_id)
            raise QueueError("away")
        self.taken[usage.report_id] = usage

    @property
    def tokens(self) -> list[float]:
        return [amounts["tokens"] for one in self.taken.values() for amounts in one.amounts.values()]


@pytest.fixture
async def reports() -> Reports:
    return Reports()


async def test_a_report_that_the_queue_refuses_is_sent_again_first(reports: Reports) -> None:
    meter = UsageMeter("rollout-0 a", lambda: None)
    reports.open.set()
    for tokens in (1, 10, 100):
        meter.add("train/0#0", "tokens", tokens)
        await meter.report(reports.send)
    assert reports.tokens == [1, 10]


async def test_a_last_report_next_to_a_regular_one_leaves_nothing_behind(reports: Reports) -> None:
    """A server that drains reports while its keeper does."""
    meter = UsageMeter("rollout-0 a", lambda: None)
    reports.open.set()
    meter.add("train/0#0", "tokens", 1)
    await meter.report(reports.send)
    reports.open.clear()
    regular = asyncio.create_task(meter.report(reports.send))
    await asyncio.sleep(0)
    meter.add("train/0#0", "tokens", 10)
    last = asyncio.create_task(meter.report(reports.send))
    await asyncio.sleep(0)
    reports.open.set()
    await asyncio.gather(regular, last)
    assert reports.tokens == [1, 10]
