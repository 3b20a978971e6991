"""A rollout server process that records episodes, to be killed: engine in words, queue in Redis."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path

from tests.gateway.talking_engine import TalkingEngine

from penstock.agent_loops import AgentConfig
from penstock.gateway import GatewayJob, mount
from penstock.rollout_server import RolloutConfig, ServerJob, serve
from penstock.transfer_queue import RedisTransferQueue, RunContext, TransferQueueConfig


async def main(url: str, password: str, token: str, model: str, folder: str, port: str) -> None:
    queue = await RedisTransferQueue.connect(url, "run", TransferQueueConfig(registry_ttl_s=2.0), password)
    config = AgentConfig(max_turns=50, max_response_tokens=20_000, max_new_tokens=400)
    run = RunContext(queue, model, token, lease_ttl_s=30.0)
    recorded = GatewayJob(run, config, request_timeout_s=30.0)
    job = ServerJob("s0", run, RolloutConfig(), Path(folder), port=int(port), mount=mount(recorded))
    await serve(job, partial(TalkingEngine, token_s=0.005))


asyncio.run(main(*sys.argv[1:]))
