"""A rollout server process with a fake engine, to be killed: prints its URL, then serves."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path

from penstock.rollout_server import RolloutConfig, ServerJob, serve
from penstock.testing import FakeEngine
from penstock.transfer_queue import Announcement, AnnouncementMark, RunContext, ServerInfo, WeightUpdate


class PrintingQueue:
    """Knows no weights; prints the URL of the first heartbeat that takes requests."""

    printed = False

    async def latest_version(self) -> Announcement | None:
        return None

    async def latest_mark(self) -> AnnouncementMark | None:
        return None

    async def heartbeat(self, server: ServerInfo) -> None:
        if server.accepting and not self.printed:
            print(server.url, flush=True)
            self.printed = True

    async def deregister(self, server_id: str) -> None:
        return

    async def servers(self) -> list[ServerInfo]:
        return []

    async def report_update(self, update: WeightUpdate) -> None:
        return


run = RunContext(PrintingQueue(), "fake", sys.argv[1])  # type: ignore[arg-type]
job = ServerJob("killed", run, RolloutConfig(), Path(sys.argv[2]))
asyncio.run(serve(job, partial(FakeEngine, token_s=0.02)))
