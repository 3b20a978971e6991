"""`penstock train`: become torchrun."""

from __future__ import annotations

import asyncio
import os
import sys

from penstock.deploy.link import Link
from penstock.deploy.processes import die_with_parent
from penstock.trainer.config import TrainerConfig


def exec_torchrun(link: Link, *, wait_s: float = 0.0) -> None:
    """Replace this process by torchrun with `trainer.ranks` ranks, meeting on a free loopback port."""
    if os.environ.get("PENSTOCK_SUPERVISED"):
        die_with_parent()  # kept over exec; torchrun passes SIGTERM on to its ranks
    trainer = asyncio.run(_settings(link, wait_s))
    python = _python(trainer)
    environment = {**os.environ, **link.environment(), "OMP_NUM_THREADS": str(trainer.threads)}
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(trainer.ranks)]
    os.execve(python, [*command, "-m", "penstock.deploy.cli", "train-rank"], environment)  # noqa: S606


async def _settings(link: Link, wait_s: float) -> TrainerConfig:
    ledger, config = await link.join(wait_s=wait_s)
    await ledger.close()
    return config.trainer


def _python(trainer: TrainerConfig) -> str:
    """megatron-core has an environment of its own, with Penstock in it. Raises `BadJob`."""
    if trainer.engine != "megatron":
        return sys.executable
    from penstock.trainer.engines.megatron.settings import find_python

    return find_python(trainer.megatron.python)
