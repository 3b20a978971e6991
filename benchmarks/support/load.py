"""A closed loop of requests: `concurrency` callers, each asks for its next answer as soon as it has the last one."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from benchmarks.support.measure import quantile

Stream = Callable[["Ask"], AsyncGenerator[int]]
"""A request → the number of tokens in each piece of its answer, as it arrives. Pieces are parsed, not only counted."""


@dataclass(frozen=True)
class Load:
    """What is asked for; JSON crosses the process border."""

    concurrency: int
    prompt_tokens: int
    answer_tokens: int
    vocab: int
    waves: int = 1
    """Answers that each caller asks for, one after the other; 0: until it is told that it is enough."""
    seed: str = ""


@dataclass(frozen=True)
class Ask:
    token_ids: list[int]
    answer_tokens: int
    episode_id: str = ""


@dataclass
class Tally:
    """What came back. Times are of the machine's own clock, so that processes can be compared."""

    began: float
    first_s: list[float] = field(default_factory=list)
    """Request → first token."""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """(when, how many tokens)"""

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.arrivals)


async def run_load(load: Load, stream: Stream, enough: asyncio.Event) -> Tally:
    """Raises where an answer is not as long as it was asked to be: a short one would be a fast one."""
    tally = Tally(time.perf_counter())
    await asyncio.gather(*(_caller(load, number, stream, enough, tally) for number in range(load.concurrency)))
    return tally


async def _caller(load: Load, number: int, stream: Stream, enough: asyncio.Event, tally: Tally) -> None:
    for ids in islice(prompts(load, number), load.waves or None):
        if load.waves == 0 and enough.is_set():
            break
        await _one(Ask(ids, load.answer_tokens), stream, tally)


def prompts(load: Load, number: int) -> Iterator[list[int]]:
    """Of caller `number`, without end. Ids of its own for each: nothing is answered from another one's prefix."""
    chance = random.Random(f"{load.seed}/{number}")
    while True:
        yield [chance.randrange(2, load.vocab) for _ in range(load.prompt_tokens)]


async def _one(ask: Ask, stream: Stream, tally: Tally) -> None:
    asked_at, received = time.perf_counter(), 0
    async with aclosing(stream(ask)) as pieces:
        async for count in pieces:
            now = time.perf_counter()
            if not received:
                tally.first_s.append(now - asked_at)
            received += count
            tally.arrivals.append((now, count))
    if received != ask.answer_tokens:
        raise ValueError(f"{received} tokens came back, {ask.answer_tokens} were asked for")


@dataclass(frozen=True)
class Took:
    """One load, summed up."""

    seconds: float
    tokens: int
    first_p50_s: float
    first_p99_s: float
    client_cpu_s: float

    @classmethod
    def of(cls, tally: Tally, client_cpu_s: float) -> Took:
        last = max(when for when, _ in tally.arrivals)
        first = tally.first_s
        return cls(last - tally.began, tally.tokens, quantile(first, 0.5), quantile(first, 0.99), client_cpu_s)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def json(self) -> dict[str, Any]:
        return asdict(self)
