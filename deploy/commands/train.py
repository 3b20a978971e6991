"""`penstock train`: become the trainer's one rank, or torchrun with several."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from penstock.common import NotPrivate, die_with_parent, interfaces_for, own_host
from penstock.deploy.config import ConfigError, RunConfig
from penstock.deploy.connection import RunConnection
from penstock.deploy.plan import NODES_VARIABLE
from penstock.deploy.roles import TORCHRUN_TELLS
from penstock.deploy.weights_folder import hold_folder, local_weights_dir
from penstock.trainer import RANKS_FILE_VARIABLE, BadJob, TrainerConfig
from penstock.trainer.engines import check_nodes

RENDEZVOUS_VARIABLE = "PENSTOCK_TRAIN_RENDEZVOUS"
RENDEZVOUS_TIMEOUT_S = 600
"""A machine that is restarted waits so long for the others."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of one machine, or of several, meet."""

    nodes: int = 1
    node_rank: int = 0
    """Node 0 has rank 0, which serves the weights and writes the run's records: the head's own machine."""
    endpoint: str = ""
    """HOST:PORT on node 0; empty on one machine."""

    @classmethod
    def of(cls, nodes: int | None, node_rank: int, endpoint: str | None) -> Rendezvous:
        """Explicit values win over the environment. Raises `ConfigError`."""
        named = os.environ.get(NODES_VARIABLE) or "1"
        if nodes is None and not re.fullmatch(r"[1-9]\d*", named):
            raise ConfigError(f"{NODES_VARIABLE}={named!r} is not a number of machines")
        nodes = nodes or int(named)
        endpoint = endpoint or os.environ.get(RENDEZVOUS_VARIABLE) or ""
        if nodes > 1 and not re.fullmatch(r".+:\d+", endpoint):
            raise ConfigError(f"--rdzv-endpoint or {RENDEZVOUS_VARIABLE}: {nodes} machines need HOST:PORT of machine 0")
        if node_rank >= nodes:
            raise ConfigError(f"--node-rank {node_rank}: must be less than --nnodes {nodes}")
        return cls(nodes, node_rank, endpoint)

    def arguments(self, ranks: int, run: str, folder: Path) -> list[str]:
        """Of torchrun; one machine's ranks meet in `folder`. `ranks`: of all machines, see `check_nodes`."""
        if self.nodes == 1:
            # Not --standalone: its store listens on every address of the machine.
            return [
                *("--nproc-per-node", str(ranks), "--local-addr", "127.0.0.1", "--rdzv-id", run),
                *("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-endpoint", str(folder / "nodes")),
            ]
        per_node = str(ranks // self.nodes)
        return [
            *("--nnodes", str(self.nodes), "--node-rank", str(self.node_rank), "--nproc-per-node", per_node),
            *("--rdzv-backend", "static", "--rdzv-endpoint", self.endpoint, "--rdzv-id", run),
            *("--rdzv-conf", f"timeout={RENDEZVOUS_TIMEOUT_S}"),
        ]


def exec_trainer(link: RunConnection, rendezvous: Rendezvous = Rendezvous(), *, wait_s: float = 0.0) -> None:
    """Replace this process by the trainer's one rank, or by torchrun with this machine's share of `trainer.ranks`.

    On one machine they meet in files, and listen on loopback alone. Raises `ConfigError`.
    """
    if os.environ.get("PENSTOCK_SUPERVISED"):
        die_with_parent()  # kept over exec; torchrun passes SIGTERM on to its ranks
    config = asyncio.run(_config(link, wait_s))
    trainer = config.trainer
    try:
        check_nodes(trainer, rendezvous.nodes)
        python = _python(trainer)
    except BadJob as error:
        raise ConfigError(str(error)) from error
    environment = {**os.environ, **link.environment(), "OMP_NUM_THREADS": str(trainer.threads)}
    words = [python]
    if (rendezvous.nodes, trainer.ranks) == (1, 1):
        environment = {name: value for name, value in environment.items() if name not in TORCHRUN_TELLS}
    else:
        folder = _new_folder(local_weights_dir(config, link.token))
        words += ["-m", "torch.distributed.run", *rendezvous.arguments(trainer.ranks, link.run, folder)]
        if rendezvous.nodes > 1:
            environment |= interfaces_for(own_host())
        else:
            environment |= {RANKS_FILE_VARIABLE: str(folder / "ranks"), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    os.execve(python, [*words, "-m", "penstock.deploy.cli", "train-rank"], environment)  # noqa: S606


def _new_folder(weights: Path) -> Path:
    """For this life's ranks alone: what an earlier one left in its files is not for them. It goes with the weights.

    Raises `ConfigError` where the weights' folder is not this user's alone.
    """
    try:
        held = hold_folder(weights)
    except NotPrivate as error:
        raise ConfigError(str(error.strerror)) from error
    os.set_inheritable(held, True)  # torchrun, which this process becomes, holds it from then on
    return Path(tempfile.mkdtemp(prefix="ranks-", dir=weights))


async def _config(link: RunConnection, wait_s: float) -> RunConfig:
    queue, config = await link.join(wait_s=wait_s)
    await queue.close()
    return config


def _python(trainer: TrainerConfig) -> str:
    """megatron-core has its own environment, with Penstock in it. Raises `BadJob`."""
    if trainer.engine != "megatron":
        return sys.executable
    from penstock.trainer.engines.megatron import find_python

    return find_python(trainer.megatron.python)
