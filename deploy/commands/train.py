"""`penstock train`: become the trainer's one rank, or torchrun with several."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import tempfile
from pathlib import Path

from penstock.common import NotPrivate, die_with_parent, interfaces_for, own_host
from penstock.deploy.config import RunConfig
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run.connection import RunConnection
from penstock.deploy.run.plan import (
    SHUTDOWN_VARIABLE,
    TORCHRUN_S,
    TORCHRUN_TELLS,
    Rendezvous,
    rank_environment,
    trainer_stop_s,
)
from penstock.deploy.run.weights_folder import hold_folder, local_weights_dir
from penstock.trainer import RANKS_FILE_VARIABLE, BadJob, TrainerConfig
from penstock.trainer.engines import check_nodes
from penstock.transfer_queue import NoSuchRun, QueueUnavailable


def exec_trainer(link: RunConnection, rendezvous: Rendezvous = Rendezvous(), *, wait_s: float = 0.0) -> None:
    """Replace this process by the trainer's one rank, or by torchrun with this machine's share of `trainer.ranks`.

    On one machine they meet in files, and listen on loopback alone. Raises `ConfigError`.
    """
    if os.environ.get("PENSTOCK_SUPERVISED"):
        die_with_parent()  # kept over exec; torchrun passes SIGTERM on to its ranks
    try:
        config = asyncio.run(_config(link, wait_s))
    except (NoSuchRun, QueueUnavailable) as error:
        raise ConfigError(str(error)) from error
    trainer = config.trainer
    try:
        check_nodes(trainer, rendezvous.nodes)
        python = python_of(trainer)
    except BadJob as error:
        raise ConfigError(str(error)) from error
    environment = {**os.environ, **link.environment(), **rank_environment(trainer)}
    words = [python]
    if (rendezvous.nodes, trainer.ranks) == (1, 1):
        environment = {name: value for name, value in environment.items() if name not in TORCHRUN_TELLS}
    else:
        environment[SHUTDOWN_VARIABLE] = str(math.ceil(trainer_stop_s(trainer) + TORCHRUN_S))
        # A folder of this life's ranks alone: files that an earlier life left are not for them. It goes with the
        # weights.
        weights = local_weights_dir(config, link.token)
        try:
            descriptor = hold_folder(weights)
        except NotPrivate as error:
            raise ConfigError(str(error.strerror)) from error
        os.set_inheritable(descriptor, True)  # torchrun, which this process becomes, holds it from then on
        folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=weights))
        words += ["-m", "torch.distributed.run", *rendezvous.arguments(trainer.ranks, link.run, folder)]
        if rendezvous.nodes > 1:
            environment |= interfaces_for(own_host())
        else:
            environment |= {RANKS_FILE_VARIABLE: str(folder / "ranks"), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    os.execve(python, [*words, "-m", "penstock.deploy.cli", "train-rank"], environment)  # noqa: S606


async def _config(link: RunConnection, wait_s: float) -> RunConfig:
    queue, config = await link.join(wait_s=wait_s)
    await queue.close()
    return config


def python_of(trainer: TrainerConfig) -> str:
    """megatron-core has its own environment, with Penstock in it. Raises `BadJob`."""
    if trainer.engine != "megatron":
        return sys.executable
    from penstock.trainer.engines.megatron import find_python

    return find_python(trainer.megatron.python)
