"""Gaps in a real trainer: between a step, its records, its spill, its checkpoint, its commit and the archive's index.

`plant` wraps the product's own methods in this process; nothing in the product knows of it.
"""

from __future__ import annotations

import functools
import importlib
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.plan import Gaps
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from penstock.common import append_jsonl
from penstock.trainer import Learner, Recorder
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.trainer.state.checkpoint import CheckpointStore
from penstock.transfer_queue import Announcement, Archive, Batch, RedisTransferQueue
from penstock.weight_sync import Manifest, WeightPublisher

STEP = ("before_lease", "after_lease", "before_update", "after_update")
PUBLISH = ("before_weights", "after_weights", "before_publish", "in_publish", "after_publish")
RECORD = ("before_record", "in_record", "after_record")
SPILL = ("before_spill", "in_spill", "after_log", "after_spill")
CHECKPOINT = ("before_save", "before_shards", "before_metadata", "before_seal", "in_seal", "after_seal")
COMMIT = ("before_commit", "in_commit", "after_commit", "in_index", "after_index")
RESUME = ("after_load", "after_rewind")
END = ("before_final_model", "after_final_model")
GAPS = (*STEP, *PUBLISH, *RECORD, *SPILL, *CHECKPOINT, *COMMIT, *RESUME, *END)
LONGEST_LIFE_S = 2.5
"""Within which a trainer that is to die anywhere dies; a life of these tests takes about as long."""


def plant(gaps: Gaps) -> None:
    _around(RedisTransferQueue, "lease_batch", "lease", gaps, counts=lambda answer: isinstance(answer, Batch))
    _around(RedisTransferQueue, "publish_version", "publish", gaps)
    _around(RedisTransferQueue, "spill", "spill", gaps)
    _around(RedisTransferQueue, "commit", "commit", gaps)
    _around(RedisTransferQueue, "rewind", "rewind", gaps)
    _around_blocking(Learner, "update", "update", gaps)
    _around_blocking(WeightPublisher, "write", "weights", gaps)
    _around_blocking(Recorder, "step", "record", gaps)
    _around_blocking(Archive, "append", "log", gaps)
    _around_blocking(Archive, "commit", "index", gaps)
    _before("penstock.transfer_queue.archive.archive", "write_atomically", "in_index", gaps)
    _around_blocking(FSDPEngine, "begin_save", "save", gaps)
    _around_blocking(FSDPEngine, "load", "load", gaps)
    _around_blocking(FileSystemWriter, "write_data", "shards", gaps)
    _around_blocking(FileSystemWriter, "finish", "metadata", gaps)
    _around_blocking(CheckpointStore, "seal", "seal", gaps)
    _around_blocking(importlib.import_module("penstock.trainer.trainer"), "save_final_model", "final_model", gaps)
    # `complete` is written and the folder has not its name yet; the step's episodes are recorded and its metrics not.
    _before("penstock.trainer.state.checkpoint", "fsync_tree", "in_seal", gaps)
    _before("penstock.trainer.state.recorder", "readable_trajectory", "in_record", gaps)


def write_down_versions(path: Path) -> None:
    """A line for each announcement that the queue took: [version, state of its tensors]."""
    for method in ("publish_version", "renew_manifest"):
        work = getattr(RedisTransferQueue, method)

        async def done(queue: Any, announcement: Announcement, work: Any = work) -> bool:
            taken: bool = await work(queue, announcement)
            if taken:
                append_jsonl(path, [[announcement.version, Manifest.parse(announcement.manifest).state]])
            return taken

        setattr(RedisTransferQueue, method, done)


def die_anywhere(chance: random.Random) -> None:
    """At some moment of this life."""
    timer = threading.Timer(chance.uniform(0.0, LONGEST_LIFE_S), os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def _around(
    owner: type, method: str, name: str, gaps: Gaps, counts: Callable[[Any], bool] = lambda answer: True
) -> None:
    work = getattr(owner, method)

    @functools.wraps(work)
    async def done(*args: Any, **kwargs: Any) -> Any:
        gaps.at(f"before_{name}")
        gaps.during(f"in_{name}")
        answer = await work(*args, **kwargs)
        if counts(answer):
            gaps.at(f"after_{name}")
        return answer

    setattr(owner, method, done)


def _around_blocking(owner: Any, method: str, name: str, gaps: Gaps) -> None:
    work = getattr(owner, method)

    @functools.wraps(work)
    def done(*args: Any, **kwargs: Any) -> Any:
        gaps.at(f"before_{name}")
        answer = work(*args, **kwargs)
        gaps.at(f"after_{name}")
        return answer

    setattr(owner, method, done)


def _before(module: str, function: str, gap: str, gaps: Gaps) -> None:
    place = importlib.import_module(module)
    work = getattr(place, function)

    @functools.wraps(work)
    def done(*args: Any, **kwargs: Any) -> Any:
        gaps.at(gap)
        return work(*args, **kwargs)

    setattr(place, function, done)
