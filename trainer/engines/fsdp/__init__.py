"""Engine `fsdp`: torch's FSDP2, any `AutoModelForCausalLM`, on CPUs and GPUs."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import TYPE_CHECKING

import lazy_loader

from penstock.trainer.config import TrainerConfig
from penstock.trainer.engines import ENGINES
from penstock.trainer.job import BadJob

if TYPE_CHECKING:
    from penstock.trainer.engine import Engine
    from penstock.trainer.job import TrainJob
    from penstock.trainer.ranks.distributed import Ranks

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def check(config: TrainerConfig) -> None:
    """Raises `BadJob` for a split that only another engine makes, and for packages that are not here."""
    if config.parallel.pipeline > 1:
        raise BadJob("trainer.engine fsdp has no trainer.parallel.pipeline; trainer.engine megatron has")
    layout = config.parallel.layout
    copies = config.ranks // layout.ranks
    if copies % layout.replicate:
        split = f" (each of {layout.ranks} ranks: parallel.tensor · context)" if layout.ranks > 1 else ""
        raise BadJob(
            f"trainer.parallel.replicate is {layout.replicate}, which does not divide the {copies} copies of the model "
            f"that trainer.ranks={config.ranks} make{split}: set it to 1 or to a divisor of {copies}"
        )
    if layout.expert > 1:
        check_experts(config)
    if config.compile and config.parallel.tensor > 1:
        raise BadJob("trainer.compile does not go with trainer.parallel.tensor: set one of them")
    if config.compile and config.recompute == "selective":  # compiled, a layer has no operations to choose from
        raise BadJob("trainer.compile does not go with trainer.recompute selective: set recompute to true or false")
    if config.activation_offload and config.recompute == "selective":  # torch keeps its choice where no hook sees it
        raise BadJob(
            "trainer.activation_offload does not move what trainer.recompute selective keeps: set recompute to true"
        )
    if config.lora.rank and find_spec("peft") is None:
        raise BadJob("trainer.lora needs the package peft: pip install 'penstock[lora]'")
    if "experts" in config.lora.names and (config.parallel.tensor > 1 or config.compile):
        raise BadJob(
            "trainer.lora.targets has experts, which go neither with trainer.parallel.tensor nor with trainer.compile: "
            "set these to 1 and false"
        )
    if config.liger and find_spec("liger_kernel") is None:
        raise BadJob("trainer.liger needs the package liger-kernel: pip install liger-kernel")


def check_experts(config: TrainerConfig) -> None:
    """Raises `BadJob` for settings under which trainer.parallel.expert would not be exact, or save no memory."""
    expert, together = config.parallel.expert, config.ranks // config.parallel.replicate
    setting, replicate = f"trainer.parallel.expert is {expert}", config.parallel.replicate
    if together % expert:
        raise BadJob(
            f"{setting}, which does not divide the {together} ranks that hold all shards (trainer.ranks="
            f"{config.ranks} / parallel.replicate {replicate}): set it to {math.gcd(together, expert)}, or to another "
            f"divisor of {together}"
        )
    if config.parallel.tensor > 1:
        raise BadJob(f"{setting}, and trainer.parallel.tensor {config.parallel.tensor}: set tensor to 1")
    if config.compile:
        raise BadJob(f"{setting}: set trainer.compile to false, compiled layers may exchange tokens in another order")
    if config.activation_offload and config.recompute is not True:
        raise BadJob(
            f"{setting}, and trainer.activation_offload would copy the experts' weights too: set trainer.recompute to "
            "true, so that layers save their inputs alone"
        )


@ENGINES.register("fsdp", check=check)
def open_fsdp(job: TrainJob, ranks: Ranks) -> Engine:
    from penstock.trainer.data.images import sees_images
    from penstock.trainer.engines.fsdp.engine import FSDPEngine

    if job.run.teacher_top_k and sees_images(job.run.model):
        raise BadJob(f"{job.run.model} sees images, and a teacher reads ids alone: remove agent.teachers")
    routing_replay = job.run.routing_replay
    return FSDPEngine(job.run.model, job.config, ranks, job.temperature, routing_replay=routing_replay)
