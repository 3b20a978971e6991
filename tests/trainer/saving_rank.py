"""A rank that reports its resident memory: saving_rank.py FOLDER MODEL.

Under trainer.offload, before the model is loaded (`before`), and in a step while a checkpoint is still written
(`saving`), which it leaves in FOLDER/resident.json.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from trainer_support import one_pack

from penstock.trainer import Ranks, TrainerConfig
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.trainer.state.hashed_files import HashingWriter


def resident() -> int:
    """Bytes of this process's own memory; files that are mapped do not count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) << 10


def main(folder: Path, model: str) -> None:
    torch.set_num_threads(1)
    ranks, pack, measured = Ranks.open(60.0), one_pack(32, 64), threading.Event()
    write_data = HashingWriter.write_data

    def write_later(self: HashingWriter, *plan: Any) -> Any:
        measured.wait()
        return write_data(self, *plan)

    before = resident()
    engine = FSDPEngine(model, TrainerConfig(offload=True), ranks)
    loss = lambda _, outputs: outputs.logprobs.sum()  # noqa: E731
    engine.update([pack], loss, 1.0, 0)  # moments are there from here on
    with patch.object(HashingWriter, "write_data", write_later):
        future = engine.begin_save(folder / "checkpoint")
        engine._actor.accumulate([pack], loss, 1.0)
        report = {"before": before, "saving": resident()}
        measured.set()
        future.result()
    (folder / "resident.json").write_text(json.dumps(report))
    ranks.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
