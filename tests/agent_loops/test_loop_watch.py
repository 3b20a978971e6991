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


def blocks_the_loop(seconds: float) -> None:
    time.sleep(seconds)


async def test_the_users_line_that_blocks_is_named_once(watch, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            await asyncio.sleep(0.06)
            blocks_the_loop(2.0)
    await asyncio.sleep(0.06)
    ((place, times),) = watch.blocked.items()
    assert "test_loop_watch.py" in place
    assert place.endswith("in blocks_the_loop")
    assert times == 2
    assert [place in record.getMessage() for record in caplog.records] == [True]
    assert watch.take_longest_s() > 1.0
    assert watch.take_longest_s() == 0.0


async def test_a_loop_that_waits_is_not_blocked(watch):
    await asyncio.gather(asyncio.sleep(2.0), asyncio.to_thread(time.sleep, 2.0))
    assert watch.blocked == {}


async def test_its_thread_ends_with_it():
    watch = LoopWatch()
    watch.start()
    watch.stop()
    assert watch._thread is not None
    assert not watch._thread.is_alive()
