from __future__ import annotations

import asyncio
import logging
import time

import pytest

from penstock.agent_loops import loop_watch
from penstock.agent_loops.loop_watch import LoopWatch


@pytest.fixture
async def watch():
    watch = LoopWatch(limit_s=1.0)
    watch.start()
    yield watch
    watch.stop()


def blocks_the_loop(watch: LoopWatch, reports: int) -> None:
    while sum(reports_of(watch)) < reports:
        time.sleep(0.01)


def reports_of(watch: LoopWatch) -> list[int]:
    """A loaded machine may add places outside this file."""
    return [times for place, times in watch.blocked.items() if place.startswith(__file__)]


async def test_loop_watch_names_the_blocking_line_once(watch, caplog):
    with caplog.at_level(logging.WARNING):
        for reports in (1, 2):
            await asyncio.sleep(0.06)
            blocks_the_loop(watch, reports)
    await asyncio.sleep(0.06)
    places = [place for place in watch.blocked if place.startswith(__file__)]
    assert all(place.endswith("in blocks_the_loop") for place in places)
    assert sum(reports_of(watch)) == 2
    assert [sum(place in record.getMessage() for record in caplog.records) for place in places] == [1] * len(places)
    assert watch.take_longest_s() > 1.0


async def test_loop_watch_names_user_code_that_begins_in_a_late_loop(monkeypatch):
    """The loop is late already, and reported, when user code begins to block it."""
    monkeypatch.setattr(loop_watch, "_is_users", lambda frame: frame.f_code.co_name == "blocks_the_loop")
    watch = LoopWatch(limit_s=0.1)
    watch.start()
    while not watch.blocked:
        time.sleep(0.01)
    blocks_the_loop(watch, sum(reports_of(watch)) + 1)
    watch.stop()
    assert sum(place.endswith("in blocks_the_loop") for place in watch.blocked) == 1


async def test_loop_watch_ignores_waiting(watch):
    await asyncio.gather(asyncio.sleep(1.5), asyncio.to_thread(time.sleep, 1.5))
    assert reports_of(watch) == []


async def test_loop_watch_stop_ends_its_thread():
    watch = LoopWatch()
    watch.start()
    watch.stop()
    assert watch._thread is not None
    assert not watch._thread.is_alive()
