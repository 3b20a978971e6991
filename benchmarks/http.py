"""What HTTP costs a client: CPU seconds of httpx over those of aiohttp, for streamed answers and for short calls.

    penstock bench http --json

httpx           with its own transport, httpcore
httpx_aiohttp   with aiohttp's transport, by `httpx-aiohttp`
aiohttp         aiohttp's own session

stream     POST with 1,000 token ids; the answer is lines of JSON, each its own chunk, read as they arrive
call       POST of a small JSON object, answered by one

All clients ask the same server, which is another process, from one event loop with the same number of requests in
flight; they take turns, so that what disturbs the machine disturbs both. Only the client's CPU time counts.

Environment: PENSTOCK_BENCH_ROUNDS (5), PENSTOCK_BENCH_ANSWERS (60, per round), PENSTOCK_BENCH_LINES (100, per answer),
PENSTOCK_BENCH_CALLS (600, per round) and PENSTOCK_BENCH_IN_FLIGHT (16).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Protocol

import aiohttp
import httpx
import uvloop
from httpx_aiohttp import AiohttpTransport

from benchmarks.support.comparison import in_turn, say
from benchmarks.support.measure import microseconds, processor

START_S = 60.0
ROUND_S = 300.0
KINDS = ("stream", "call")
SIDES = ("httpx", "httpx_aiohttp", "aiohttp")
PROMPT = {"token_ids": list(range(1000))}
CALL = {"name": "run", "arguments": {"code": "print(1 + 1)"}}


@dataclass(frozen=True)
class HttpExtent:
    """How much is measured, from the environment."""

    rounds: int
    answers: int
    lines: int
    calls: int
    in_flight: int

    @classmethod
    def read(cls) -> HttpExtent:
        given = {"rounds": 5, "answers": 60, "lines": 100, "calls": 600, "in_flight": 16}
        return cls(**{name: int(os.environ.get(f"PENSTOCK_BENCH_{name.upper()}", n)) for name, n in given.items()})


class Client(Protocol):
    async def stream(self, lines: int) -> int:
        """The number of tokens of one streamed answer."""

    async def call(self) -> int:
        """The `received` of one short call."""


class Aiohttp:
    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http

    async def stream(self, lines: int) -> int:
        async with self._http.post("/stream", json={**PROMPT, "lines": lines}) as answer:
            return sum([len(json.loads(line)["token_ids"]) async for line in answer.content])

    async def call(self) -> int:
        async with self._http.post("/call", json=CALL) as answer:
            return int((await answer.json())["received"])


class Httpx:
    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def stream(self, lines: int) -> int:
        async with self._http.stream("POST", "/stream", json={**PROMPT, "lines": lines}) as answer:
            return sum([len(json.loads(line)["token_ids"]) async for line in answer.aiter_lines()])

    async def call(self) -> int:
        return int((await self._http.post("/call", json=CALL)).json()["received"])


def measure() -> dict[str, Any]:
    return uvloop.run(_measure(HttpExtent.read()))


async def _measure(extent: HttpExtent) -> dict[str, Any]:
    seconds: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in KINDS} for name in SIDES}
    async with (
        _server() as url,
        aiohttp.ClientSession(url) as session,
        httpx.AsyncClient(base_url=url) as client,
        httpx.AsyncClient(base_url=url, transport=AiohttpTransport()) as bridged,
    ):
        sides: dict[str, Client] = {
            "httpx": Httpx(client),
            "httpx_aiohttp": Httpx(bridged),
            "aiohttp": Aiohttp(session),
        }
        for number in range(-1, extent.rounds):  # the first is not measured: connections are made in it
            for name in in_turn(list(sides), number):
                taken = await _round(sides[name], extent)
                if number >= 0:
                    seconds[name]["stream"].append(taken[0] / extent.answers / extent.lines)
                    seconds[name]["call"].append(taken[1] / extent.calls)
            say(f"http: round {number + 1} of {extent.rounds}")
    cost = {name: {kind: median(values) for kind, values in of.items()} for name, of in seconds.items()}
    return {
        "bench": "http",
        "ratio": {
            f"{kind}_{name}_over_aiohttp": round(cost[name][kind] / cost["aiohttp"][kind], 3)
            for name in SIDES[:-1]
            for kind in KINDS
        },
        "figures": {
            name: {"cpu_us_per_line": microseconds(of["stream"]), "cpu_us_per_call": microseconds(of["call"])}
            for name, of in cost.items()
        },
        "setup": {**processor(), **asdict(extent), "httpx": httpx.__version__, "aiohttp": aiohttp.__version__},
    }


async def _round(client: Client, extent: HttpExtent) -> tuple[float, float]:
    """CPU seconds of this process for the streamed answers, and for the calls."""
    stream = await _cpu_seconds(lambda: client.stream(extent.lines), extent.answers, extent.in_flight)
    call = await _cpu_seconds(client.call, extent.calls, extent.in_flight)
    return stream, call


async def _cpu_seconds(request: Callable[[], Awaitable[int]], count: int, in_flight: int) -> float:
    left = iter(range(count))

    async def caller() -> None:
        for _ in left:
            assert await request() > 0

    began = time.process_time()
    async with asyncio.timeout(ROUND_S), asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(caller())
    return time.process_time() - began


@asynccontextmanager
async def _server() -> AsyncIterator[str]:
    command = [sys.executable, "-m", "benchmarks.support.stream_server"]
    pipe = asyncio.subprocess.PIPE
    server = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        url = await asyncio.wait_for(server.stdout.readline(), START_S)
        yield url.decode().strip()
    finally:
        server.stdin.close()
        await asyncio.wait_for(server.wait(), START_S)
