"""Hedging: two streams, of which the first to yield is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

from penstock.rollout_server.client.client import hedge


class Source:
    """Yields `items` after `silence_s`; knows whether it was closed."""

    def __init__(self, items: list[int | Exception], silence_s: float = 0.0) -> None:
        self.items, self.silence_s = items, silence_s
        self.asked = self.closed = False

    async def read(self) -> AsyncGenerator[int]:
        self.asked = True
        try:
            await asyncio.sleep(self.silence_s)
            for item in self.items:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed = True


def opens(source: Source | None) -> Callable[[], Awaitable[AsyncGenerator[int] | None]]:
    async def second() -> AsyncGenerator[int] | None:
        return source.read() if source else None

    return second


async def race(first: Source, second: Source | None, after_s: float = 0.02) -> list[int]:
    return [item async for item in hedge(first.read(), after_s, opens(second))]


async def test_one_that_speaks_in_time_is_alone() -> None:
    second = Source([9])
    assert await race(Source([1, 2]), second, 5.0) == [1, 2]
    assert not second.asked


async def test_after_silence_the_first_token_wins_and_the_loser_is_closed() -> None:
    slow, quick = Source([1], 30.0), Source([7, 8], 0.01)
    assert await race(slow, quick) == [7, 8]
    assert slow.closed
    late = Source([9], 30.0)
    assert await race(Source([1, 2], 0.1), late) == [1, 2]
    assert late.asked
    assert late.closed


async def test_one_that_fails_before_it_speaks_loses() -> None:
    assert await race(Source([ValueError("first")], 0.05), Source([7], 0.2)) == [7]
    assert await race(Source([1], 0.2), Source([ValueError("second")])) == [1]


async def test_where_both_fail_or_there_is_no_other_the_error_is_raised() -> None:
    with pytest.raises(ValueError, match="second"):
        await race(Source([ValueError("first")], 0.05), Source([ValueError("second")], 0.1))
    with pytest.raises(ValueError, match="first"):
        await race(Source([ValueError("first")], 0.05), None)
    with pytest.raises(ValueError, match="later"):
        await race(Source([1, ValueError("later")]), None)


async def test_closing_the_race_closes_who_is_left() -> None:
    source = Source([1, 2])
    items = hedge(source.read(), 1.0, opens(None))
    assert await anext(items) == 1
    await items.aclose()
    assert source.closed
