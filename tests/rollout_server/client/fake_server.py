"""A rollout server process with a fake engine, to be killed: prints its URL, then serves."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path

from penstock.rollout_server import RolloutConfig, ServerJob, serve
from penstock.testing import FakeEngine, MemoryTransferQueue
from penstock.transfer_queue import RunContext, ServerInfo


class PrintingQueue(MemoryTransferQueue):
    async def heartbeat(self, server: ServerInfo) -> None:
        if server.accepting and not await self.servers():
            print(server.url, flush=True)
            await super().heartbeat(server)


run = RunContext(PrintingQueue(registry_ttl_s=1e9), "fake", sys.argv[1])
job = ServerJob("killed", run, RolloutConfig(), Path(sys.argv[2]))
asyncio.run(serve(job, partial(FakeEngine, token_s=0.1)))
