"""Trainer processes that start at once: ``python nursery.py`` imports torch once and forks one for each line read.

A line of the input is a `Life` as JSON; the answer, when that process has ended, is ``{"code": …}``, negative where a
signal ended it. One process at a time; all end with this one.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch.utils.tensorboard  # noqa: F401 - loaded once, before the first fork
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
from faults.plan import ANYWHERE, Gaps
from planted import die_anywhere, plant, write_down_versions
from trainer_support import make_job

from penstock.common import die_with_parent
from penstock.trainer import train
from penstock.transfer_queue import Archive, RedisTransferQueue, TransferQueueConfig


@dataclass(frozen=True)
class Life:
    """What one trainer process is told."""

    folder: str
    model: str
    url: str
    run: str
    password: str
    settings: dict[str, Any]
    gap: str = ""
    """Where it dies; empty: nowhere."""
    passes: int = 1
    seed: int = 0


async def live(life: Life) -> None:
    """Train to the end, or to the gap."""
    folder, chance = Path(life.folder), random.Random(life.seed)
    write_down_versions(folder / "versions.jsonl")
    plant(Gaps(life.gap, life.passes, chance))
    if life.gap == ANYWHERE:
        die_anywhere(chance)
    archive = Archive(folder / "run" / "archive", life.run, 1 << 30)
    config = TransferQueueConfig(deadline_s=30.0)
    queue = await RedisTransferQueue.connect(life.url, life.run, config, life.password, archive=archive)
    job = make_job(folder, life.model, life.settings, queue=queue, archive=archive)
    try:
        await queue.create_run(job.limits, "kills: 1")
        await train(job)
    finally:
        await queue.close()


def become(life: Life) -> NoReturn:
    """This process, freshly forked, is that trainer from now on."""
    die_with_parent()
    log = os.open(Path(life.folder) / "trainer.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        asyncio.run(live(life))
        code = 0
    except BaseException:  # noqa: BLE001 - written to the log, told by the exit code
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            become(Life(**json.loads(line)))
        _, status = os.waitpid(child, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    main()
