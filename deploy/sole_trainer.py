"""One trainer of a run at a time, also where its next life begins on another machine before the last one has ended."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

from penstock.deploy.run_dir import RunDir

logger = logging.getLogger(__name__)
EARLIER_ONE_ENDS_S = 90.0
"""It saves a checkpoint and ends (`TRAINER_STOP_S`); a shared disk forgets the lock of a dead machine later still."""
LOOK_AGAIN_S = 0.2


class TrainerAlive(Exception):
    """An earlier trainer of this run still holds its folder."""


@contextlib.asynccontextmanager
async def sole_trainer(run: RunDir, wait_s: float = EARLIER_ONE_ENDS_S) -> AsyncIterator[None]:
    """Entered by rank 0 when no other trainer is alive; the other ranks wait for rank 0 when they form their group.

    Two at once would write the same checkpoints and publish the same versions. The kernel, or the shared disk's server,
    lets go of the lock when its process dies. Raises `TrainerAlive` after `wait_s`.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    run.root.mkdir(parents=True, exist_ok=True)
    with (run.root / "trainer.lock").open("a") as file:
        await _take(file.fileno(), run.root, time.monotonic() + wait_s)
        yield


async def _take(descriptor: int, folder: Path, deadline: float) -> None:
    told = False
    while not _lock(descriptor):
        if time.monotonic() >= deadline:
            raise TrainerAlive(f"{folder}: another trainer of this run is still alive; end it, or wait until it has")
        if not told:
            logger.info("an earlier trainer of this run is ending; waiting for it")
            told = True
        await asyncio.sleep(LOOK_AGAIN_S)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
