"""Training engines by name: who computes logprobs, gradients and updates. `trainer.engine` chooses one.

An engine is a function (job, ranks) → `engine.Engine` in a separate file or folder here, registered with a `check`
that refuses settings it cannot serve before anything is loaded. Importing it loads neither torch nor its libraries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.common import Registry
from penstock.trainer.config import TrainerConfig
from penstock.trainer.job import BadJob

if TYPE_CHECKING:
    from penstock.trainer.engine import Engine
    from penstock.trainer.job import TrainJob
    from penstock.trainer.ranks.distributed import Ranks

OpenEngine = Callable[["TrainJob", "Ranks"], "Engine"]

ENGINES: Registry[OpenEngine] = Registry("engine", package=__name__)


def check_engine(config: TrainerConfig) -> None:
    """Raises `UnknownName`, or `BadJob` for settings that the engine cannot serve."""
    check = getattr(ENGINES.get(config.engine), "check", None)
    layout = config.parallel.layout
    if config.ranks % layout.ranks:
        raise BadJob(
            f"trainer.ranks is {config.ranks}; one copy of the model takes {layout.ranks} (parallel.tensor "
            f"{layout.tensor} · context {layout.context} · pipeline {layout.stages}): ranks must be a multiple of that"
        )
    if check is not None:
        check(config)


def check_nodes(config: TrainerConfig, nodes: int) -> None:
    """Raises `BadJob` if the ranks cannot be divided evenly over `machines` machines."""
    here, rest = divmod(config.ranks, nodes)
    if rest or not here:
        raise BadJob(f"trainer.ranks={config.ranks} is not divisible by {nodes} machines: each has as many of them")
    tensor, replicate = config.parallel.tensor, config.parallel.replicate
    together = config.ranks // replicate
    if replicate > 1 and here % together and together % here:
        raise BadJob(
            f"trainer.parallel.replicate is {replicate}: each {together} consecutive ranks hold all shards, and {here} "
            f"of {config.ranks} ranks are on each of {nodes} machines, so that some would lie over parts of two "
            f"machines. Set it to {nodes}: the shards of a set are then on one machine"
        )
    expert = config.parallel.expert
    if here % expert and expert % here:
        raise BadJob(
            f"trainer.parallel.expert is {expert}: so many consecutive ranks share out the experts, and {here} of "
            f"{config.ranks} ranks are on each of {nodes} machines, so that some would lie over parts of two machines. "
            f"Set it to {math.gcd(expert, here)}"
        )
    if nodes > 1 and here % tensor:
        raise BadJob(
            f"trainer.parallel.tensor is {tensor}, and {here} of {config.ranks} ranks are on each of {nodes} machines: "
            "ranks that share matrices exchange every layer's results and must be on one machine. Let it divide the "
            "ranks of a machine, or set trainer.parallel.pipeline (megatron)"
        )
