"""Batches of rows: who shares one, who is refused, who is dropped, and that one failure stays its own batch's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from penstock.rollout_server import Batcher
from penstock.rollout_server.scoring.batcher import Busy, Late


class Recorded:
    """A score per row: the sum of its ids. Holds its thread while `gate` is closed."""

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[float]:
        self.batches.append([list(row) for row in rows])
        assert self.gate.wait(60)
        if any(13 in row for row in rows):
            raise ValueError("unlucky")
        return [float(sum(row)) for row in rows]


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture
async def batcher(recorded: Recorded) -> AsyncIterator[Callable[..., Batcher]]:
    made: list[Batcher] = []

    def make(**settings: Any) -> Batcher:
        made.append(Batcher(recorded, **settings))
        made[-1].start()
        return made[-1]

    yield make
    recorded.gate.set()
    for one in made:
        await one.close()


async def occupied(batches: Batcher, recorded: Recorded) -> asyncio.Future[list[float]]:
    """The row that the scoring thread holds until the gate is opened."""
    recorded.gate.clear()
    first = asyncio.ensure_future(batches.submit([[1]], 60))
    while not recorded.batches:
        await asyncio.sleep(0.005)
    return first


async def test_what_comes_together_is_scored_together_and_answered_in_order(batcher, recorded: Recorded) -> None:
    batches = batcher(wait_s=0.05)
    found = await asyncio.gather(batches.submit([[1], [2, 2]], 60), batches.submit([[3]], 60))
    assert found == [[1.0, 4.0], [3.0]]
    assert recorded.batches == [[[1], [2, 2], [3]]]
    assert (batches.batches, batches.rows) == (1, 3)


async def test_rows_and_padded_tokens_bound_a_batch(batcher, recorded: Recorded) -> None:
    batches = batcher(wait_s=0, max_rows=2, max_tokens=6)
    rows = [[1], [1, 1], [1] * 3, [1] * 4, [1] * 9]
    assert await batches.submit(rows, 60) == [1, 2, 3, 4, 9]
    assert [[len(row) for row in batch] for batch in recorded.batches] == [[1, 2], [3], [4], [9]]


async def test_a_full_queue_refuses_and_takes_nothing(batcher, recorded: Recorded) -> None:
    batches = batcher(wait_s=0, max_rows=1, max_waiting=2)
    first = await occupied(batches, recorded)
    waiting = asyncio.ensure_future(batches.submit([[2], [3]], 60))
    await asyncio.sleep(0)
    with pytest.raises(Busy, match="2 answers wait"):
        await batches.submit([[4]], 60)
    recorded.gate.set()
    assert await asyncio.gather(first, waiting) == [[1.0], [2.0, 3.0]]


async def test_what_nobody_waits_for_any_more_is_not_scored(batcher, recorded: Recorded) -> None:
    batches = batcher(wait_s=0, max_rows=1)
    first = await occupied(batches, recorded)
    with pytest.raises(Late, match="not scored within"):
        await batches.submit([[2]], 0.02)
    given_up = asyncio.ensure_future(batches.submit([[3]], 60))
    await asyncio.sleep(0)
    given_up.cancel()
    recorded.gate.set()
    assert await first == [1.0]
    assert await batches.submit([[4]], 60) == [4.0]
    assert recorded.batches == [[[1]], [[4]]]


async def test_a_failure_reaches_those_of_its_batch_alone(batcher, recorded: Recorded) -> None:
    batches = batcher(wait_s=0, max_rows=2)
    found = await asyncio.gather(batches.submit([[13], [1]], 60), batches.submit([[2]], 60), return_exceptions=True)
    assert isinstance(found[0], ValueError)
    assert found[1] == [2.0]


async def test_another_number_of_scores_than_rows_is_a_failure_of_its_batch_alone() -> None:
    batches = Batcher(lambda rows: [1.0] * (1 if len(rows) == 1 else 3), wait_s=0)
    batches.start()
    with pytest.raises(ValueError, match="3 scores for 2 rows"):
        await batches.submit([[1], [2]], 60)
    assert await batches.submit([[1]], 60) == [1.0]
    assert batches.alive
    await batches.close()


async def test_closing_fails_what_waits_and_what_is_being_scored(batcher, recorded: Recorded) -> None:
    batches = batcher(wait_s=0, max_rows=1)
    first = await occupied(batches, recorded)
    second = asyncio.ensure_future(batches.submit([[2]], 60))
    await asyncio.sleep(0)
    await batches.close()
    for one in (first, second):
        with pytest.raises(Late, match="ending"):
            await one
    assert not batches.alive
