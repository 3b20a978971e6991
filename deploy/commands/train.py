"""`penstock train`: become torchrun."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from dataclasses import dataclass

from penstock.deploy.link import Link
from penstock.deploy.load_config import ConfigError
from penstock.deploy.processes import die_with_parent
from penstock.trainer.config import TrainerConfig

NODES_VARIABLE = "PENSTOCK_TRAIN_NODES"
RENDEZVOUS_VARIABLE = "PENSTOCK_TRAIN_RENDEZVOUS"
RENDEZVOUS_TIMEOUT_S = 600
"""A machine that is restarted waits so long for the others."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of one machine, or of several, meet."""

    nodes: int = 1
    node_rank: int = 0
    """Node 0 has rank 0, which serves the weights and writes the run's records: the head's own machine."""
    endpoint: str = ""
    """HOST:PORT on node 0; empty on one machine."""

    @classmethod
    def of(cls, nodes: int | None, node_rank: int, endpoint: str | None) -> Meeting:
        """Explicit values win over the environment. Raises `ConfigError`."""
        named = os.environ.get(NODES_VARIABLE) or "1"
        if nodes is None and not re.fullmatch(r"[1-9]\d*", named):
            raise ConfigError(f"{NODES_VARIABLE}={named!r} is no number of machines")
        nodes = nodes or int(named)
        endpoint = endpoint or os.environ.get(RENDEZVOUS_VARIABLE) or ""
        if nodes > 1 and not re.fullmatch(r".+:\d+", endpoint):
            raise ConfigError(
                f"--rdzv-endpoint or {RENDEZVOUS_VARIABLE}: {nodes} machines meet at HOST:PORT of machine 0"
            )
        if node_rank >= nodes:
            raise ConfigError(f"--node-rank {node_rank}: of {nodes} machines the last is {nodes - 1}")
        return cls(nodes, node_rank, endpoint)

    def arguments(self, ranks: int, run: str) -> list[str]:
        """Of torchrun. Raises `ConfigError` where the ranks cannot be shared out evenly."""
        if self.nodes == 1:
            return ["--standalone", "--nproc-per-node", str(ranks)]
        here, rest = divmod(ranks, self.nodes)
        if rest or not here:
            raise ConfigError(f"trainer.ranks={ranks} cannot be shared out evenly over {self.nodes} machines")
        return [
            *("--nnodes", str(self.nodes), "--node-rank", str(self.node_rank), "--nproc-per-node", str(here)),
            *("--rdzv-backend", "static", "--rdzv-endpoint", self.endpoint, "--rdzv-id", run),
            *("--rdzv-conf", f"timeout={RENDEZVOUS_TIMEOUT_S}"),
        ]


def exec_torchrun(link: Link, meeting: Meeting = Meeting(), *, wait_s: float = 0.0) -> None:
    """Replace this process by torchrun with this machine's share of `trainer.ranks`.

    On one machine they meet on a free loopback port. Raises `ConfigError`.
    """
    if os.environ.get("PENSTOCK_SUPERVISED"):
        die_with_parent()  # kept over exec; torchrun passes SIGTERM on to its ranks
    trainer = asyncio.run(_settings(link, wait_s))
    python = _python(trainer)
    environment = {**os.environ, **link.environment(), "OMP_NUM_THREADS": str(trainer.threads)}
    command = [python, "-m", "torch.distributed.run", *meeting.arguments(trainer.ranks, link.run)]
    os.execve(python, [*command, "-m", "penstock.deploy.cli", "train-rank"], environment)  # noqa: S606


async def _settings(link: Link, wait_s: float) -> TrainerConfig:
    ledger, config = await link.join(wait_s=wait_s)
    await ledger.close()
    return config.trainer


def _python(trainer: TrainerConfig) -> str:
    """megatron-core has an environment of its own, with Penstock in it. Raises `BadJob`."""
    if trainer.engine != "megatron":
        return sys.executable
    from penstock.trainer.engines.megatron.settings import find_python

    return find_python(trainer.megatron.python)
