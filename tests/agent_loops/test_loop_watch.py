from __future__ import annotations

import asyncio
import logging
import time

import pytest

from penstock.agent_loops import LoopWatch


@pytest.fixture
async def watch():
    watch = LoopWatch(limit_s=1.0)
    watch.start()
    yield watch
    watch.stop()


def blocks_the_loop(watch: LoopWatch, reports: int) -> None:
    while sum(watch.blocked.values()) < reports:
        time.sleep(0.01)


async def test_loop_watch_names_the_blocking_line_once(watch, caplog):
    with caplog.at_level(logging.WARNING):
        for reports in (1, 2):
            await asyncio.sleep(0.06)
            blocks_the_loop(watch, reports)
    await asyncio.sleep(0.06)
    ((place, times),) = watch.blocked.items()
    assert "test_loop_watch.py" in place
    assert place.endswith("in blocks_the_loop")
    assert times == 2
    assert [place in record.getMessage() for record in caplog.records] == [True]
    assert watch.take_longest_s() > 1.0
    assert watch.take_longest_s() == 0.0


async def test_loop_watch_ignores_waiting(watch):
    await asyncio.gather(asyncio.sleep(1.5), asyncio.to_thread(time.sleep, 1.5))
    assert watch.blocked == {}


async def test_loop_watch_stop_ends_its_thread():
    watch = LoopWatch()
    watch.start()
    watch.stop()
    assert watch._thread is not None
    assert not watch._thread.is_alive()
