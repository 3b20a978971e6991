"""An agent worker that does nothing but lease and complete, as fast as it can. Started by million.py.

python -m benchmarks.support.worker_child NAME REDIS_URL    (password in PENSTOCK_BENCH_PASSWORD)
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import uvloop

from benchmarks.support.child import answer_questions, own_stdout
from benchmarks.support.queue_calls import TINY, open_queue
from penstock.transfer_queue import COMPLETED, Lease, Trajectory, TransferQueue

LEASES = 64
"""Asked for by one call, and completed at the same time."""
IDLE_S = 0.005
"""Before asking again where nothing could be leased."""


async def work(name: str, url: str, password: str, run: str, steps: int) -> dict[str, Any]:
    """Lease and complete until version `steps` is published. Returns how many were completed."""
    queue = await open_queue(url, password, run)
    completed = 0
    try:
        while (version := await _version(queue)) < steps:
            leases = await queue.lease_episodes(name, LEASES, version)
            await asyncio.gather(*(_complete(queue, lease, version) for lease in leases))
            completed += len(leases)
            if not leases:
                await asyncio.sleep(IDLE_S)
    finally:
        await queue.close()
    return {"completed": completed}


async def _version(queue: TransferQueue) -> int:
    latest = await queue.latest_version()
    return 0 if latest is None else latest.version


async def _complete(queue: TransferQueue, lease: Lease, version: int) -> None:
    segment = replace(TINY, version_spans=np.array([[version, 0, len(TINY.response_ids)]], dtype=np.int32))
    await queue.complete(
        lease, Trajectory(lease.episode_id, lease.task.task_id, (segment,), float(lease.member % 2), COMPLETED)
    )


def main() -> None:
    replies = own_stdout()
    name, url = sys.argv[1:]
    password = os.environ["PENSTOCK_BENCH_PASSWORD"]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answer_questions(replies, lambda question: runner.run(work(name, url, password, **question)))


if __name__ == "__main__":
    main()
