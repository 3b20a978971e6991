"""Two ranks, one of which gets SIGTERM in the middle of a step: stopped_ranks.py FOLDER MODEL.

FOLDER/undisturbed is a run that nobody stops. In FOLDER/stopped rank `TOLD` gets the signal in the second pack of step
`AT`, the other rank none; the same processes then go on with the run. Each rank leaves in FOLDER/said_RANK how each
life ended, and what the queue said after it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from parallel_ranks import become_ranks
from trainer_support import make_job

from penstock.trainer import RANKS_FILE_VARIABLE, TrainJob, train
from penstock.trainer.engines.fsdp import FSDPEngine

TOLD, AT = 1, 3
SETTINGS: dict[str, Any] = {"ranks": 2, "micro_batch_tokens": 24, "checkpoint_every": 100, "rank_timeout_s": 0}
UPDATE = FSDPEngine.update


class Signalled:
    """Sends this process SIGTERM in the middle of the step's forward and backward, and waits there until it is told."""

    def __init__(self) -> None:
        self.told = threading.Event()
        self.packs = 0

    def update(self, engine: FSDPEngine, packs: Any, loss: Any, divisor: float, step: int) -> Any:
        def watched(pack: Any, outputs: Any) -> torch.Tensor:
            self.packs += 1
            if self.packs == 2 and os.environ["RANK"] == str(TOLD):
                os.kill(os.getpid(), signal.SIGTERM)
                assert self.told.wait(60)
            return loss(pack, outputs)

        return UPDATE(engine, packs, watched if step == AT else loss, divisor, step)


async def live(job: TrainJob, signalled: Signalled) -> str:
    task, loop = asyncio.ensure_future(train(job)), asyncio.get_running_loop()

    def tell() -> None:
        task.cancel()
        loop.call_later(0.5, signalled.told.set)

    loop.add_signal_handler(signal.SIGTERM, tell)
    try:
        await task
    except asyncio.CancelledError:
        return "cancelled"
    return "returned"


def state(job: TrainJob) -> list[int]:
    return [job.run.queue.version, job.run.queue.committed]


def main(folder: Path, model: str) -> None:
    rank = os.environ["RANK"]

    def life(job: TrainJob, name: str) -> str:
        os.environ[RANKS_FILE_VARIABLE] = str(folder / f"ranks_{name}")
        return asyncio.run(live(job, signalled))

    signalled = Signalled()
    jobs = [make_job(folder / name, model, SETTINGS) for name in ("undisturbed", "stopped")]
    for job in jobs:
        job.run.queue.twin = rank != "0"
    life(jobs[0], "undisturbed")

    def update(engine: FSDPEngine, *arguments: Any) -> Any:
        return signalled.update(engine, *arguments)

    FSDPEngine.update = update
    said: dict[str, Any] = {"first": life(jobs[1], "first"), "packs": signalled.packs, "stopped": state(jobs[1])}
    FSDPEngine.update = UPDATE
    said |= {"second": life(jobs[1], "second"), "done": state(jobs[1])}
    (folder / f"said_{rank}").write_text(json.dumps(said))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for made in ("undisturbed", "stopped"):
        (Path(sys.argv[1]) / made).mkdir()
    if become_ranks(2):
        main(Path(sys.argv[1]), sys.argv[2])
