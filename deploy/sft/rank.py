"""The trainer of `penstock sft`: one process, or torchrun with `trainer.ranks` of them."""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
from pathlib import Path

from penstock.common import die_with_parent, uncollected
from penstock.deploy.config import load_config
from penstock.deploy.run.plan import SHUTDOWN_VARIABLE, TORCHRUN_S, Rendezvous, trainer_stop_s
from penstock.deploy.run.roles import fatal, sole_trainer
from penstock.deploy.run_dir import RunDir
from penstock.trainer import RANKS_FILE_VARIABLE

MEETING = "ranks-"


def exec_sft_ranks(folder: Path) -> None:
    """Replaces this process by torchrun with the run's ranks, which meet in files and listen on loopback alone."""
    if os.environ.get("PENSTOCK_SUPERVISED"):
        die_with_parent()  # kept over exec
    config = load_config(RunDir(folder).config)
    for leftover in folder.glob(f"{MEETING}*"):
        shutil.rmtree(leftover, ignore_errors=True)  # what an earlier life's ranks left is not for these
    meeting = Path(tempfile.mkdtemp(prefix=MEETING, dir=folder))
    words = Rendezvous().arguments(config.trainer.ranks, config.name, meeting)
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    environment = {
        **os.environ,
        RANKS_FILE_VARIABLE: str(meeting / "ranks"),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        SHUTDOWN_VARIABLE: str(math.ceil(trainer_stop_s(config.trainer) + TORCHRUN_S)),
    }
    rank = ["-m", "penstock.deploy.cli", "sft-rank", str(folder)]
    os.execve(sys.executable, [*command, *rank], environment)  # noqa: S606


async def sft_rank(folder: Path) -> None:
    """One rank. Its run's folder has the resolved recipe, and the conversations in ``data``."""
    with uncollected():
        from penstock.common import UnknownName
        from penstock.trainer import BadBatch, BadJob, SftJob, TrainingDiverged, fine_tune

    config, run = load_config(RunDir(folder).config), RunDir(folder)
    validation = run.data / "validation.safetensors"
    job = SftJob(
        model=config.model,
        config=config.trainer,
        sft=config.sft,
        run_dir=folder,
        train=run.data / "train.safetensors",
        validation=validation if validation.exists() else None,
        seed=config.seed,
        settings=config.model_dump(mode="json"),
    )
    with fatal(BadJob, BadBatch, UnknownName, TrainingDiverged):
        async with sole_trainer(run):
            await fine_tune(job)
