"""A rank with engine megatron, started by torchrun: rank.py CASE FOLDER MODEL SETTINGS."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import torch  # noqa: E402

if not torch.cuda.is_available():
    import cpu_shim  # noqa: F401 - before anything of megatron

from safetensors.torch import save_file  # noqa: E402
from trainer_support import make_job, make_trajectory  # noqa: E402

from penstock.trainer.batch import make_step_batch, share_of  # noqa: E402
from penstock.trainer.checkpoint import CheckpointStore  # noqa: E402
from penstock.trainer.config import TrainerConfig  # noqa: E402
from penstock.trainer.engines.megatron.engine import MegatronEngine  # noqa: E402
from penstock.trainer.learner import Learner  # noqa: E402
from penstock.trainer.loop import train  # noqa: E402
from penstock.trainer.ranks import Ranks  # noqa: E402
from penstock.transfer_queue.ledger import Batch  # noqa: E402
from penstock.transfer_queue.trajectory import DataCursor  # noqa: E402

FIRST_STEPS = 2


def run(folder: Path, model: str, settings: dict[str, Any]) -> None:
    """A whole run of the trainer."""
    job = make_job(folder, model, settings)
    job.ledger.twin = os.environ["RANK"] != "0"
    asyncio.run(train(job))


def round_trip(folder: Path, model: str, settings: dict[str, Any]) -> None:
    """What the engine publishes of the weights that it loaded."""
    with_engine(model, settings, lambda engine, ranks: keep(folder / "published.safetensors", engine, ranks))


def first_steps(folder: Path, model: str, settings: dict[str, Any]) -> None:
    """Steps 0 and 1, a checkpoint of them, step 2."""

    def steps(engine: MegatronEngine, ranks: Ranks) -> None:
        for step in range(FIRST_STEPS):
            train_one(engine, ranks, step)
        store = CheckpointStore(folder / "checkpoints", keep=2)
        keep(folder / "saved.safetensors", engine, ranks)
        writing = engine.begin_save(store.unfinished(FIRST_STEPS))
        # The checkpoint has the state at the call, whatever comes after.
        train_one(engine, ranks, FIRST_STEPS)
        writing.result(timeout=60)
        if ranks.first:
            store.seal(FIRST_STEPS, DataCursor(), ranks.world, {})
        keep(folder / "straight.safetensors", engine, ranks)

    with_engine(model, settings, steps)


def next_step(folder: Path, model: str, settings: dict[str, Any]) -> None:
    """Step 2 from that checkpoint."""

    def step(engine: MegatronEngine, ranks: Ranks) -> None:
        found = CheckpointStore(folder / "checkpoints", keep=2).newest()
        assert found is not None
        engine.load(found)
        keep(folder / "restored.safetensors", engine, ranks)
        train_one(engine, ranks, FIRST_STEPS)
        keep(folder / "resumed.safetensors", engine, ranks)

    with_engine(model, settings, step)


def with_engine(model: str, settings: dict[str, Any], use: Callable[[MegatronEngine, Ranks], None]) -> None:
    config = TrainerConfig(lr=1e-3, eps=1e-4, **settings)
    ranks = Ranks.open(60, config.parallel.layout)
    try:
        use(MegatronEngine(model, config, ranks), ranks)
    finally:
        ranks.close()


def train_one(engine: MegatronEngine, ranks: Ranks, step: int) -> None:
    groups = [[make_trajectory(f"train/{step}/{g}", m, step) for m in range(4)] for g in range(2)]
    ids = Batch(step, [[one.episode_id for one in group] for group in groups])
    share = share_of(ids, ranks.data.rank, ranks.data.world, 1)
    batch = make_step_batch(ids, share, [one for g in share for one in groups[g]], 0, engine.limits)
    learner = Learner(engine.config, engine, ranks.data)
    scored = learner.score(batch)
    learner.update(batch, scored, learner.advantages(batch, scored))


def keep(path: Path, engine: MegatronEngine, ranks: Ranks) -> None:
    weights = dict(engine.weights(torch.float32))
    if ranks.first:
        save_file({name: one.contiguous() for name, one in weights.items()}, path)


def main() -> None:
    torch.set_num_threads(1)
    case, folder, model, settings = sys.argv[1:]
    cases = {one.__name__: one for one in (run, round_trip, first_steps, next_step)}
    cases[case](Path(folder), model, json.loads(settings))


if __name__ == "__main__":
    main()
