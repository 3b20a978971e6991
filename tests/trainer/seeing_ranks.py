"""One update of a model that sees images, on one rank or on two: seeing_ranks.py RANKS FOLDER MODEL.

Of two, rank 0 has the rows with images in two packs, rank 1 one pack without any, and an empty one beside the other.
Rank 0 leaves FOLDER/updated.safetensors and FOLDER/update.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from image_rows import mixed_rows
from parallel_ranks import become_ranks
from safetensors.torch import save_file

from penstock.trainer import Ranks, TrainerConfig
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.trainer.packing import join_rows


def main(folder: Path, model: str) -> None:
    ranks = Ranks.open(120.0)
    try:
        engine = FSDPEngine(model, TrainerConfig(lr=1e-2, eps=1e-2), ranks)
        rows = mixed_rows()
        packs = [join_rows(rows[:2]), join_rows(rows[3:])] if ranks.rank == 0 else []
        if ranks.rank == ranks.world - 1:
            packs.append(join_rows(rows[2:3]))
        update = engine.update(packs, lambda pack, outputs: -outputs.logprobs.sum(), 55.0, 0)
        weights = dict(engine.weights(torch.float32))
        if ranks.is_rank0:
            save_file(weights, folder / "updated.safetensors")
            (folder / "update.json").write_text(json.dumps([update.loss, update.grad_norm]))
    finally:
        ranks.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if become_ranks(int(sys.argv[1])):
        main(Path(sys.argv[2]), sys.argv[3])
