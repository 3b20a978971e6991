"""A rank of a run with bad input, started by torchrun: two_ranks_bad.py FOLDER MODEL CASE; writes how it ended."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from trainer_support import ScriptedQueue, make_job, make_trajectory

from penstock.trainer import train
from penstock.transfer_queue import Limits, Trajectory

BAD_TOKENS = {"nan": 7, "vocabulary": 64, "turn rewards": 0}


def producing(token: int) -> Any:
    """Episodes of odd tasks, which are rank 1's, begin with `token`, or have too few turn rewards under 0."""

    def produce(task_id: str, member: int, version: int) -> Trajectory:
        trajectory = make_trajectory(task_id, member, version)
        (segment,) = trajectory.segments
        prompt = np.where(segment.prompt_ids == token, 8, segment.prompt_ids).astype(np.int32)
        response = np.where(segment.response_ids == token, 8, segment.response_ids).astype(np.int32)
        bad = int(task_id.rpartition("/")[2]) % 2
        if bad and token:
            prompt[0] = token
        changed = replace(segment, prompt_ids=prompt, response_ids=response)
        return replace(trajectory, segments=[changed], turn_rewards=(1.0,) if bad and not token else ())

    return produce


def job_of(case: str, folder: Path, model: str) -> Any:
    if case == "uneven":
        limits = Limits(group_size=4, groups_per_step=3, max_staleness=1)
        settings = {"steps": 2, "minibatches": 2, "micro_batch_tokens": 48}
        return make_job(folder, model, settings, limits=limits, queue=ScriptedQueue(limits))
    limits = Limits(group_size=4, groups_per_step=2, max_staleness=1)
    settings = {"max_bad_steps": 1, "batch_timeout_s": 20.0}
    return make_job(folder, model, settings, queue=ScriptedQueue(limits, producing(BAD_TOKENS[case])))


def write_threads(folder: Path) -> None:
    """The names of this process's threads, one a line."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    (folder / f"threads_{os.environ['RANK']}").write_text("".join(names))


def main() -> None:
    folder, model, case = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    atexit.register(write_threads, folder)  # before the trainer registers anything: the last to be called
    job = job_of(case, folder, model)
    job.run.queue.twin = os.environ["RANK"] != "0"
    try:
        asyncio.run(train(job))
        ended = "trained"
    except Exception as error:  # noqa: BLE001 - how it ended is what the test asks
        ended = f"{type(error).__name__}: {error}"
    (folder / f"ended_{os.environ['RANK']}").write_text(ended)


if __name__ == "__main__":
    main()
