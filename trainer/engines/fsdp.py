"""Engine `fsdp`: torch's FSDP2, any `AutoModelForCausalLM`, on CPUs and GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.trainer.algorithm import BadJob
from penstock.trainer.config import TrainerConfig
from penstock.trainer.engines import ENGINES

if TYPE_CHECKING:
    from penstock.trainer.engine import Engine
    from penstock.trainer.job import TrainJob
    from penstock.trainer.ranks import Ranks


def check(config: TrainerConfig) -> None:
    """Raises `BadJob` for a split that only another engine makes."""
    split = [name for name, ranks in config.parallel.model_dump().items() if ranks > 1]
    if split:
        raise BadJob(f"trainer.engine fsdp has no trainer.parallel.{split[0]}; trainer.engine megatron has")


@ENGINES.register("fsdp", check=check)
def open_fsdp(job: TrainJob, ranks: Ranks) -> Engine:
    from penstock.trainer.engine import FSDPEngine

    return FSDPEngine(job.model, job.config, ranks, job.temperature)
