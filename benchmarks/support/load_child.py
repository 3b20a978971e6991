"""A load generator as a process: the same requests through the client or to the bare engine. See `rollout_run`.

python -m benchmarks.support.load_child    (the run and its secrets are in the environment, as for any role)

    {"do": "client", "load": {…}}                       RolloutClient → sidecar → engine
    {"do": "bare", "load": {…}, "engine", "address"}    the same engine, asked directly
    {"do": "stop"}                                      has no answer: ends a load of 0 waves
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import traceback
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import IO, Any

import uvloop

from benchmarks.support.bare import BareEngine
from benchmarks.support.child import own_stdout
from benchmarks.support.load import Ask, Load, Stream, Tally, Took, run_load
from penstock.deploy import RunConnection
from penstock.rollout_server import GenerateRequest, RolloutClient, Sampling
from penstock.transfer_queue import RedisTransferQueue

TIMEOUT_S = 600.0


class Generator:
    """Everything stays open between questions, as in a worker."""

    def __init__(self) -> None:
        self._queue: RedisTransferQueue | None = None
        self._client_of_run: RolloutClient | None = None
        self._bare: dict[str, BareEngine] = {}
        self.enough = asyncio.Event()
        """An endless load ends, with the answers that it has begun."""

    async def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """What the load came to, see `load.Took`; with its arrivals where the question asks for them."""
        stream = await self._stream(question)
        cpu_began = time.process_time()
        self.enough.clear()
        tally = await run_load(Load(**question["load"]), stream, self.enough)
        took = Took.of(tally, time.process_time() - cpu_began).json()
        return took | _arrivals(tally) if question.get("arrivals") else took

    async def _stream(self, question: dict[str, Any]) -> Stream:
        if question["do"] == "client":
            return stream_of(await self._client())
        return self._bare_engine(question["engine"], question["address"]).stream

    async def _client(self) -> RolloutClient:
        if self._client_of_run is None:
            link = RunConnection.from_environment()
            self._queue = await link.connect()
            self._client_of_run = RolloutClient(self._queue, link.token, TIMEOUT_S)
        return self._client_of_run

    def _bare_engine(self, engine: str, address: dict[str, str]) -> BareEngine:
        where = address["socket"] or address["url"]
        if where not in self._bare:
            self._bare[where] = BareEngine(engine, address)
        return self._bare[where]

    async def close(self) -> None:
        if self._client_of_run is not None:
            await self._client_of_run.close()
        for bare in self._bare.values():
            await bare.close()
        if self._queue is not None:
            await self._queue.close()


def stream_of(client: RolloutClient) -> Stream:
    async def stream(ask: Ask) -> AsyncGenerator[int]:
        sampling = Sampling(max_new_tokens=ask.answer_tokens)
        request = GenerateRequest(token_ids=ask.token_ids, sampling=sampling, episode_id=ask.episode_id)
        async with aclosing(client.stream(request)) as chunks:
            async for chunk in chunks:
                yield len(chunk.token_ids)

    return stream


def _arrivals(tally: Tally) -> dict[str, Any]:
    return {"arrivals": [(round(when, 4), count) for when, count in tally.arrivals]}


async def serve(replies: IO[str]) -> None:
    """Answer until stdin ends. The loop runs between questions too: servers close idle connections."""
    generator = Generator()
    working: asyncio.Task[None] | None = None
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            question = json.loads(line)
            if question["do"] == "stop":
                generator.enough.set()
            else:
                working = asyncio.create_task(_reply(generator, question, replies))
                working.add_done_callback(_end_if_failed)
    finally:
        if working is not None:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        await generator.close()


async def _reply(generator: Generator, question: dict[str, Any], replies: IO[str]) -> None:
    replies.write(json.dumps(await generator.answer(question)) + "\n")
    replies.flush()


def _end_if_failed(work: asyncio.Task[None]) -> None:
    """The benchmark hears of it by the end of this process, and reads why in its log."""
    if not work.cancelled() and (error := work.exception()) is not None:
        traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    uvloop.run(serve(own_stdout()))
