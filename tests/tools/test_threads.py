"""Plain functions of users in threads: calls that never return, cancelled ones, context, errors."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator

import pytest

from penstock.tools import UserThreads, call_users
from penstock.tools.threads import TooManyAbandonedCalls


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a hung call waits for; opened at the end, so that its thread ends."""
    event = threading.Event()
    yield event
    event.set()


async def leave_behind(threads: UserThreads, gate: threading.Event, count: int) -> None:
    started = [threading.Event() for _ in range(count)]

    def hang(mine: threading.Event) -> None:
        mine.set()
        gate.wait()

    for mine in started:
        call = asyncio.create_task(threads.run(lambda mine=mine: hang(mine), "hang"))
        async with asyncio.timeout(60):
            while not mine.is_set():
                await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.wait([call])


async def test_threads_hanging_calls_take_no_place(gate: threading.Event) -> None:
    threads = UserThreads(at_once=2)
    await leave_behind(threads, gate, 5)
    async with asyncio.timeout(60):
        assert await threads.run(lambda: 7, "sound") == 7


async def test_threads_refuse_further_calls_and_name_the_hanging(gate: threading.Event) -> None:
    threads = UserThreads(at_once=2, left_behind_most=3)
    await leave_behind(threads, gate, 3)
    with pytest.raises(TooManyAbandonedCalls, match=r"3 calls never returned \(hang\)"):
        await threads.run(lambda: 7, "sound")
    gate.set()
    async with asyncio.timeout(60):
        while True:
            try:
                assert await threads.run(lambda: 7, "sound") == 7
                break
            except TooManyAbandonedCalls:
                await asyncio.sleep(0.01)


async def test_threads_at_most_so_many_run_at_once() -> None:
    running, most, lock = 0, 0, threading.Lock()
    meet = threading.Barrier(3)

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        meet.wait(timeout=60)  # passed by three at once, by no two
        with lock:
            running -= 1

    threads = UserThreads(at_once=3)
    await asyncio.gather(*(threads.run(work, "work") for _ in range(9)))
    assert most == 3


async def test_threads_errors_context_and_async_functions_are_callers() -> None:
    told = contextvars.ContextVar("told", default="nothing")
    told.set("something")
    assert await call_users(told.get) == "something"

    async def coroutine(value: int) -> int:
        return value + 1

    assert await call_users(coroutine, 1) == 2
    with pytest.raises(ZeroDivisionError):
        await call_users(lambda: 1 // 0)
