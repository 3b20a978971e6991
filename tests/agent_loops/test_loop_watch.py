from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref

import pytest
from tests.until import until

from penstock.agent_loops import loop_watch
from penstock.agent_loops.loop_watch import LoopWatch, current_call


class Reporting(LoopWatch):
    """Lets code that blocks the loop wait for its report."""

    def __init__(self, limit_s: float = 1.0) -> None:
        super().__init__(limit_s)
        self.reported = threading.Event()
        self.named = threading.Event()
        """Set by the report of `blocks_the_loop`: a loaded machine adds those of other places."""

    def _report(self, place: str, seconds: float, *, is_users: bool) -> None:
        super()._report(place, seconds, is_users=is_users)
        self.reported.set()
        if place.endswith(" in blocks_the_loop"):
            self.named.set()

    def places(self) -> dict[str, int]:
        """Those of this file: a loaded machine may add others."""
        return {place: times for place, times in self.blocked.items() if place.startswith(__file__)}


@pytest.fixture
async def watch():
    watch = Reporting()
    watch.start()
    yield watch
    watch.stop()


def blocks_the_loop(watch: Reporting) -> None:
    assert watch.named.wait(60)
    watch.named.clear()


async def test_loop_watch_names_the_blocking_line_once(watch, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            await asyncio.sleep(0.06)
            blocks_the_loop(watch)
    await asyncio.sleep(0.06)
    ((place, times),) = watch.places().items()
    assert place.endswith("in blocks_the_loop")
    assert times == 2
    assert sum(place in record.getMessage() for record in caplog.records) == 1
    assert watch.take_longest_s() > 1.0


async def test_loop_watch_blames_no_step_where_many_make_the_loop_late(watch, monkeypatch):
    """As on a loaded machine, or beside threads that compute. Each step ends once it has been looked at."""
    looks = []

    def look(thread):
        looks.append(thread)
        return current_call(thread)

    async def until_seen():
        seen = len(looks)
        while len(looks) == seen:
            time.sleep(0.001)

    monkeypatch.setattr(loop_watch, "current_call", look)
    await asyncio.gather(*(until_seen() for _ in range(7)))
    assert watch.places() == {}


async def test_loop_watch_names_user_code_that_begins_in_a_late_loop(monkeypatch):
    """The loop is late already, and reported, when user code begins to block it."""
    monkeypatch.setattr(loop_watch, "_is_users", lambda frame: frame.f_code.co_name == "blocks_the_loop")
    watch = Reporting(limit_s=0.1)
    watch.start()
    assert watch.reported.wait(60)
    blocks_the_loop(watch)
    watch.stop()
    assert [place.rpartition(" in ")[2] for place in watch.blocked][-1] == "blocks_the_loop"


async def test_loop_watch_names_no_line_that_started_the_loop(caplog):
    """A library blocks; below the loop is user code, here this file, that waits for it. The user can repair nothing."""
    watch = Reporting(limit_s=0.1)

    async def main():
        watch.start()
        asyncio.get_running_loop().call_soon(watch.reported.wait, 60)
        await asyncio.sleep(0.1)

    await asyncio.to_thread(asyncio.run, main())
    watch.stop()
    assert watch.blocked
    assert watch.places() == {}
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_loop_watch_holds_nothing_of_what_it_names(watch):
    def blocks_with_a_large_object():
        large = set()
        blocks_the_loop(watch)
        return weakref.ref(large)

    large = blocks_with_a_large_object()
    await until(lambda: large() is None)


async def test_loop_watch_ignores_waiting(watch):
    await asyncio.gather(asyncio.sleep(1.5), asyncio.to_thread(time.sleep, 1.5))
    assert watch.places() == {}


async def test_loop_watch_stop_ends_its_thread():
    watch = LoopWatch()
    watch.start()
    watch.stop()
    assert watch._thread is not None
    assert not watch._thread.is_alive()
