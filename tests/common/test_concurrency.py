from __future__ import annotations

import asyncio

import pytest

from penstock.common.concurrency import cancel_and_wait, gather_or_cancel


class Work:
    def __init__(self) -> None:
        self.ended: list[str] = []

    async def forever(self, name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.ended.append(name)

    async def value(self, value: int, after: int = 0) -> int:
        for _ in range(after):
            await asyncio.sleep(0)
        return value

    async def fail(self) -> None:
        await asyncio.sleep(0)
        raise ValueError("one failed")


async def test_results_are_in_order() -> None:
    work = Work()
    assert await gather_or_cancel([work.value(1, after=5), work.value(2)]) == [1, 2]
    assert await gather_or_cancel([work.value(3)]) == [3]
    assert await gather_or_cancel([]) == []


async def test_a_failure_ends_the_others_first() -> None:
    work = Work()
    with pytest.raises(ValueError, match="one failed"):
        await gather_or_cancel([work.forever("a"), work.fail(), work.forever("b")])
    assert sorted(work.ended) == ["a", "b"]


async def test_cancelling_the_caller_ends_all() -> None:
    work = Work()
    task = asyncio.create_task(gather_or_cancel([work.forever("a"), work.forever("b")]))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(work.ended) == ["a", "b"]


async def test_cancel_and_wait_gives_time_and_ignores_failures() -> None:
    work = Work()
    quick, failed, slow = (asyncio.ensure_future(one) for one in (work.value(7, 3), work.fail(), work.forever("s")))
    await cancel_and_wait([quick, failed], timeout_s=60)
    assert quick.result() == 7
    assert isinstance(failed.exception(), ValueError)
    await cancel_and_wait([quick, failed, slow], timeout_s=0.05)
    assert slow.cancelled()
    await cancel_and_wait([], timeout_s=1)
