"""The trainer of `penstock sft`: one process, or torchrun with `trainer.ranks` of them."""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from penstock.common import die_with_parent, uncollected
from penstock.deploy.config import RunConfig, load_config
from penstock.deploy.run.plan import SHUTDOWN_VARIABLE, TORCHRUN_S, Rendezvous, trainer_stop_s
from penstock.deploy.run.roles import fatal, sole_trainer
from penstock.deploy.run_dir import RunDir
from penstock.trainer import RANKS_FILE_VARIABLE

MEETING = "ranks-"


def exec_sft_ranks(folder: Path) -> None:
    """Replaces this process by the ranks of the run in `folder`."""
    if os.environ.get("PENSTOCK_SUPERVISED"):
        die_with_parent()  # kept over exec
    exec_ranks(folder, load_config(RunDir(folder).config), ["sft-rank", str(folder)])


def exec_ranks(folder: Path, config: RunConfig, rank: Sequence[str], python: str = sys.executable) -> None:
    """Replaces this process by torchrun with the run's ranks, each `rank` of our commands; they meet in files of
    `folder` and listen on loopback alone."""
    for leftover in folder.glob(f"{MEETING}*"):
        shutil.rmtree(leftover, ignore_errors=True)  # what an earlier life's ranks left is not for these
    meeting = Path(tempfile.mkdtemp(prefix=MEETING, dir=folder))
    words = Rendezvous().arguments(config.trainer.ranks, config.name, meeting)
    command = [python, "-m", "torch.distributed.run", *words, "-m", "penstock.deploy.cli", *rank]
    environment = {
        **os.environ,
        RANKS_FILE_VARIABLE: str(meeting / "ranks"),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        SHUTDOWN_VARIABLE: str(math.ceil(trainer_stop_s(config.trainer) + TORCHRUN_S)),
    }
    os.execve(python, command, environment)  # noqa: S606


async def sft_rank(folder: Path) -> None:
    """Run one rank. The run's folder has the resolved recipe, and the conversations in ``data``."""
    with uncollected():
        from penstock.common import UnknownName
        from penstock.trainer import BadBatch, BadJob, NotSaved, SftJob, TrainingDiverged, fine_tune

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
    with fatal(BadJob, BadBatch, UnknownName, TrainingDiverged, NotSaved):
        async with sole_trainer(run):
            await fine_tune(job)
