"""A rollout server process to be killed: real queue, hf or fake engine; writes down what its engine is asked.

``killable_server.py hf|mixture|fake NAME QUEUE_URL RUN MODEL FOLDER``; secrets from the environment. In FOLDER:
``NAME.pid``, the engine's process, and ``NAME.asked``, one JSON object per request: its id and the context that the
engine got.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from penstock.rollout_server import Chunk, EngineInfo, GenerateRequest, RolloutConfig, ServerJob, serve
from penstock.rollout_server.engines.hf.engine import HFEngine
from penstock.testing import FakeEngine
from penstock.transfer_queue import RedisTransferQueue, RunContext, TransferQueueConfig

KIND, NAME, URL, RUN, MODEL = sys.argv[1:6]
FOLDER = Path(sys.argv[6])


class Written:
    """Mixed into an engine: what it is asked is on disk before it answers, whatever happens then."""

    async def start(self) -> EngineInfo:
        info = await super().start()  # type: ignore[misc]
        process = getattr(self, "process", None)
        (FOLDER / f"{NAME}.pid").write_text(str(process.pid if process else os.getpid()))
        return info

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        line = json.dumps({"id": request.request_id, "context": request.token_ids}).encode() + b"\n"
        with (FOLDER / f"{NAME}.asked").open("ab", buffering=0) as file:
            file.write(line)
        async with aclosing(super().generate(request)) as chunks:  # type: ignore[misc]
            async for chunk in chunks:
                yield chunk


async def main() -> None:
    queue = await RedisTransferQueue.connect(URL, RUN, TransferQueueConfig(), os.environ["PENSTOCK_REDIS_PASSWORD"])
    # recompute: what follows a swap is what a plain forward pass of the new weights gives.
    config = RolloutConfig(
        max_model_len=512,
        max_concurrent=32,
        kv_cache_tokens=16384,
        max_restarts=10_000,
        pause="recompute",
        routing_replay=KIND in ("fake", "mixture"),
    )
    job = ServerJob(NAME, RunContext(queue, MODEL, os.environ["PENSTOCK_TOKEN"]), config, FOLDER)
    engine: Any = type("Engine", (Written, FakeEngine if KIND == "fake" else HFEngine), {})
    await serve(job, partial(engine, token_s=0.004) if KIND == "fake" else engine)


with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
