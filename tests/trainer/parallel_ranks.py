"""A rank of one whole learner, started by torchrun: parallel_ranks.py FOLDER MODEL SETTINGS.

SETTINGS is JSON: `config` of the trainer, `steps` to train from the start or, with `resume`, from the checkpoint in
FOLDER. Rank 0 leaves losses, gradient norms and all weights; every rank its share of a checkpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from trainer_support import make_trajectory

from penstock.trainer.batch import make_step_batch, share_of
from penstock.trainer.checkpoint import CheckpointStore, begin_save, load
from penstock.trainer.config import TrainerConfig
from penstock.trainer.engine import FSDPEngine
from penstock.trainer.learner import Learner
from penstock.trainer.ranks import Ranks
from penstock.transfer_queue.ledger import Batch
from penstock.transfer_queue.trajectory import DataCursor

GROUPS, MEMBERS = 4, 3


def train_step(learner: Learner, engine: FSDPEngine, ranks: Ranks, step: int) -> dict[str, Any]:
    """Step `step` of the same batches on any number of ranks; returns its metrics."""
    groups = [[make_trajectory(f"train/{step}/{g}", m, step) for m in range(MEMBERS)] for g in range(GROUPS)]
    batch = Batch(step, [[t.episode_id for t in group] for group in groups])
    share = share_of(batch, ranks.data.rank, ranks.data.world, engine.config.minibatches)
    mine = [t for group in share for t in groups[group]]
    made = make_step_batch(batch, share, mine, 0, engine.limits)
    scored = learner.score(made)
    return learner.update(made, scored, learner.advantages(made, scored))


def run(folder: Path, model: str, settings: dict[str, Any]) -> None:
    config = TrainerConfig(**{"lr": 1e-3, "eps": 1e-4, "micro_batch_tokens": 64, **settings["config"]})
    ranks = Ranks.open(120.0, config.parallel.layout)
    try:
        engine = FSDPEngine(model, config, ranks)
        learner = Learner(config, engine, ranks.data)
        store, first = CheckpointStore(folder / "checkpoints", keep=2), 0
        store.open()
        if settings.get("resume"):
            found = store.newest()
            assert found is not None
            load(engine, ranks, found)
            first = found.step
        lines = [train_step(learner, engine, ranks, first + step) for step in range(settings["steps"])]
        done = first + settings["steps"]
        begin_save(engine, ranks, store.unfinished(done)).result(timeout=60)
        weights = {name: tensor.contiguous() for name, tensor in engine.weights(torch.float32)}
        if ranks.first:
            store.seal(done, DataCursor(), ranks.world, {})
            save_file(weights, folder / f"weights_{done}.safetensors")
            (folder / f"metrics_{done}.json").write_text(json.dumps(lines))
    finally:
        ranks.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
