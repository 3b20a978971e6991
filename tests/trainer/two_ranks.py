"""Whole runs on two ranks, one after the other: two_ranks.py FOLDER CASES. Each rank has a queue of the same episodes.

CASES is JSON: name → `model`, and `settings` of the trainer or the name of a `bad` batch; `disk_s`: how long a version
takes to be written. In the case "patient" ranks only meet. Every rank writes into
FOLDER/NAME how it ended, and the names of the threads it ends with.

In the case "uneven" versions are published as deltas. In the cases of `OTHER` the queue of rank 1 went back, and gives
it something else than rank 0 for step 1.

Ranks are forked once everything is imported, since importing it takes longer than a run.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import parallel_ranks
import torch
import torch.utils.tensorboard
from trainer_support import ProducingQueue, make_job, make_trajectory

from penstock.trainer import Ranks, train
from penstock.transfer_queue import FieldValues, Limits, Trajectory
from penstock.weight_sync import Manifest, WeightFiles, WeightSource

LATE_S = 30.0
"""Ranks open their group within a third of it, and a process may stand still for seconds."""
DELTAS: dict[str, Any] = {"weights_full_every": 9, "dtype": "bfloat16"}
BAD_TOKENS = {"nan": 7, "vocabulary": 64}


def producing(token: int) -> Any:
    """Episodes of odd tasks, which are rank 1's, begin with `token`."""

    def produce(task_id: str, member: int, version: int) -> Trajectory:
        trajectory = make_trajectory(task_id, member, version)
        (segment,) = trajectory.segments
        prompt = np.where(segment.prompt_ids == token, 8, segment.prompt_ids).astype(np.int32)
        response = np.where(segment.response_ids == token, 8, segment.response_ids).astype(np.int32)
        if int(task_id.rpartition("/")[2]) % 2:
            prompt[0] = token
        return replace(trajectory, segments=[replace(segment, prompt_ids=prompt, response_ids=response)])

    return produce


class OtherGroups(ProducingQueue):
    """Its step 1 has one group of rank 0's and one that was made since."""

    def numbers_of(self, step: int) -> Sequence[int]:
        return (2, 4) if step == 1 else super().numbers_of(step)


class OtherLengths(ProducingQueue):
    """Step 1 has rank 0's groups in another life, in which the dear one is the other one: rank 1 takes rank 0's."""

    async def get(self, episode_ids: Sequence[str], fields: Sequence[str]) -> list[FieldValues]:
        found = await super().get(episode_ids, fields)
        if not self.twin or episode_ids[0] not in self.steps.get(1, [[""]])[0]:
            return found
        return [replace(one, segments=other.segments) for one, other in zip(found, reversed(found), strict=True)]


OTHER = {"other groups": OtherGroups, "other lengths": OtherLengths}


def job_of(case: str, folder: Path, model: str) -> Any:
    if case == "uneven":
        limits = Limits(group_size=4, groups_per_step=3, max_staleness=1)
        settings = {"steps": 2, "minibatches": 2, "micro_batch_tokens": 48, "lr": 1e-6}
        return make_job(folder, model, settings, limits=limits, queue=ProducingQueue(limits), rollout=DELTAS)
    limits = Limits(group_size=4, groups_per_step=2, max_staleness=1)
    if case in OTHER:
        return make_job(folder, model, {"steps": 3}, queue=OTHER[case](limits))
    settings = {"max_bad_steps": 1}
    # Rank 1's queue never hears of a version, so that only a run that ends before it spills may archive here.
    queue = ProducingQueue(limits, producing(BAD_TOKENS[case]))
    return make_job(folder, model, settings, queue=queue, archives=case == "nan")


def run(folder: Path, case: Mapping[str, Any]) -> None:
    """One rank of one run."""
    atexit.register(parallel_ranks.write_threads, folder)  # first registered, called last
    bad, model = case.get("bad"), case["model"]
    job = job_of(bad, folder, model) if bad else make_job(folder, model, case["settings"])
    job.run.queue.twin = os.environ["RANK"] != "0"
    try:
        asyncio.run(train(job))
        ended = "trained"
    except Exception as error:  # noqa: BLE001 - how it ended is what the test asks
        ended = f"{type(error).__name__}: {error}"
    (folder / f"ended_{os.environ['RANK']}").write_text(ended)
    if job.run.queue.announced:  # rank 0's alone
        (folder / "published.json").write_text(json.dumps(asdict(job.run.queue.announced[-1])))


def refuse_whole_version(*_: Any) -> None:
    raise AssertionError("rank 0 was given a whole version to write: each rank keeps its share")


def meet_late(folder: Path) -> None:
    """Rank 1 comes to a meeting when a collective's deadline is long over, and well before that of meetings."""
    ranks = Ranks.open(LATE_S / 3, patience_s=200)
    if ranks.rank:
        time.sleep(LATE_S)  # the delay under test; this rank has no event loop to block
    ranks.meet()
    ranks.close()
    (folder / f"ended_{ranks.rank}").write_text("met")


def write_slowly(seconds: float) -> None:
    """From now on a version takes so long."""
    write = WeightFiles.write_from_ranks

    def slow(self: WeightFiles, version: int, source: WeightSource) -> Manifest:
        time.sleep(seconds)  # a slow disk; it blocks only the thread that writes
        return write(self, version, source)

    WeightFiles.write_from_ranks = slow  # type: ignore[method-assign]


def main(folder: Path, cases: Mapping[str, Any]) -> None:
    WeightFiles.write = refuse_whole_version  # type: ignore[assignment]
    for name, case in cases.items():
        (folder / name).mkdir()
        if parallel_ranks.become_ranks(2):
            if name == "patient":
                return meet_late(folder / name)
            write_slowly(case.get("disk_s", 0.0))
            return run(folder / name, case)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
