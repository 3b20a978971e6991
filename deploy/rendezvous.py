"""Where the ranks of a trainer meet: in files on one machine, at a port of the first of several."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from penstock.deploy.config import ConfigError
from penstock.deploy.plan import NODES_VARIABLE

RENDEZVOUS_VARIABLE = "PENSTOCK_TRAIN_RENDEZVOUS"
RENDEZVOUS_TIMEOUT_S = 600
"""A machine that is restarted waits so long for the others."""
TORCHRUN_TELLS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Variables: a rank that has none of them is alone. Another's torchrun may have started this process."""


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
