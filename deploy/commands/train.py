"""`penstock train`: become torchrun."""

from __future__ import annotations

import asyncio
import os
import sys

from penstock.deploy.link import Link
from penstock.deploy.processes import die_with_parent


def exec_torchrun(link: Link) -> None:
    """Replace this process by torchrun with `trainer.ranks` ranks, meeting on a free loopback port."""
    if os.environ.get("PENSTOCK_SUPERVISED"):
        die_with_parent()  # kept over exec; torchrun passes SIGTERM on to its ranks
    ranks, threads = asyncio.run(_ranks(link))
    environment = {**os.environ, **link.environment(), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    os.execve(sys.executable, [*command, "-m", "penstock.deploy.cli", "train-rank"], environment)  # noqa: S606


async def _ranks(link: Link) -> tuple[int, int]:
    ledger, config = await link.join()
    await ledger.close()
    return config.trainer.ranks, config.trainer.threads
