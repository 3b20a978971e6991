"""Which role runs on which node of a job.

node 0                queue · head, which supervises the trainer
nodes 1 … T - 1       the trainer's further ranks
nodes T …             rollout servers and agent workers in turn, a sandbox server; with N = T they share the nodes
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.common import is_loopback
from penstock.deploy.config import RunConfig
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run.plan import gpus_of_server
from penstock.rollout_server import RolloutConfig
from penstock.trainer import BadJob
from penstock.trainer.engines import check_nodes


@dataclass(frozen=True, slots=True)
class JobLayout:
    """Counts and indices; node i is the i-th of the job."""

    nodes: int
    trainer_nodes: int
    ranks_per_node: int
    servers: int
    evaluation_server: bool
    workers: int
    gpus_per_node: int
    gpus_per_server: int
    """0 without GPUs."""

    @property
    def first_other(self) -> int:
        """The first node with rollout servers and agent workers."""
        return self.trainer_nodes if self.nodes > self.trainer_nodes else 0

    @property
    def others(self) -> int:
        return self.nodes - self.first_other

    @property
    def trainer_gpus(self) -> int:
        return self.ranks_per_node if self.gpus_per_node else 0


def place(
    config: RunConfig,
    nodes: int,
    *,
    trainer_nodes: int | None = None,
    gpus_per_node: int = 0,
    gpus_per_server: int | None = None,
) -> JobLayout:
    """Spread the recipe's servers and workers evenly. Raises `ConfigError` if they do not fit."""
    trainer_nodes = trainer_nodes or (math.ceil(config.trainer.ranks / gpus_per_node) if gpus_per_node else 1)
    if trainer_nodes > nodes:
        raise ConfigError(f"--nodes {nodes}: the trainer alone takes {trainer_nodes}; see --trainer-nodes")
    try:
        check_nodes(config.trainer, trainer_nodes)
    except BadJob as error:
        raise ConfigError(str(error)) from error
    layout = JobLayout(
        nodes=nodes,
        trainer_nodes=trainer_nodes,
        ranks_per_node=config.trainer.ranks // trainer_nodes,
        servers=config.rollout.servers,
        evaluation_server=config.rollout.evaluation_server,
        workers=config.agent.workers,
        gpus_per_node=gpus_per_node,
        gpus_per_server=(gpus_per_server or server_gpus(config.rollout)) if gpus_per_node else 0,
    )
    _check_machines(config, layout)
    _check_gpus(layout)
    return layout


def server_gpus(rollout: RolloutConfig) -> int:
    """GPUs of one rollout server on nodes that have some; at least one, as a node's CPUs are shared out by its GPUs."""
    return max(gpus_of_server(rollout), 1)


def _check_machines(config: RunConfig, layout: JobLayout) -> None:
    """Check that all nodes reach the recipe's files and have what its engines need."""
    if config.trainer.engine == "megatron" and not layout.gpus_per_node:
        raise ConfigError("trainer.engine=megatron computes on NVIDIA GPUs: say how many a node has (--gpus-per-node)")
    if layout.nodes == 1:
        return
    named = {"transfer_queue.url": config.transfer_queue.url}
    if config.sandbox.backend == "remote":
        named["sandbox.url"] = config.sandbox.url
    for key, url in named.items():
        if url and is_loopback(urlsplit(url).hostname):
            raise ConfigError(
                f"{key}={url} is reached by one node alone, and the job has {layout.nodes}: name its host"
            )


def _check_gpus(layout: JobLayout) -> None:
    """Every node has the GPUs for what is on it."""
    if not layout.gpus_per_node:
        return
    if layout.servers and layout.gpus_per_server > layout.gpus_per_node:
        raise ConfigError(
            f"a rollout server of {layout.gpus_per_server} GPUs does not fit on a node with --gpus-per-node "
            f"{layout.gpus_per_node}, and no server spans nodes: lower its tensor, pipeline or data parallelism "
            "(rollout.vllm_args, rollout.sglang_args)"
        )
    if layout.trainer_gpus > layout.gpus_per_node:
        raise ConfigError(f"{layout.trainer_gpus} trainer ranks on a node with --gpus-per-node {layout.gpus_per_node}")
    servers = layout.servers + layout.evaluation_server
    fullest = -(-servers // layout.others)
    free = layout.gpus_per_node - (layout.trainer_gpus if layout.first_other == 0 else 0)
    if fullest * layout.gpus_per_server > free:
        most = free // layout.gpus_per_server * layout.others - layout.evaluation_server
        fewer = f"set rollout.servers to at most {most}, or " if most > 0 else ""
        raise ConfigError(
            f"{servers} rollout servers of {layout.gpus_per_server} GPU(s) do not fit on {layout.others} node(s) with "
            f"{free} free GPUs each: {fewer}raise --nodes"
        )
