"""Engine `megatron`: megatron-core, for models that need tensor, pipeline, context or expert parallelism.

Hugging Face folder ⇄ mbridge ⇄ megatron-core's GPTModel in stages ── DistributedDataParallel ── distributed optimizer

engine.py     the engine itself: groups, score, update, weights, how much arithmetic the model is
bridge.py     one mbridge bridge: model and weights by Hugging Face's names; the layers without Transformer Engine
inputs.py     a pack as rows in a rectangle, or packed and cut over context ranks
routing.py    routers that send tokens to the experts that read them in the engine, and count how they share out
stages.py     packs through the pipeline; logprobs and entropy from the last stage's hidden states
optimizer.py  the distributed optimizer: clip, skip, step; masters and moments as full tensors
state.py      checkpoints by Hugging Face's names, whatever the layout
settings.py   settings, machines and models that the engine cannot serve
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import lazy_loader

from penstock.trainer.engines import ENGINES
from penstock.trainer.engines.megatron.settings import check

if TYPE_CHECKING:
    from penstock.trainer.engine import Engine
    from penstock.trainer.job import TrainJob
    from penstock.trainer.ranks.distributed import Ranks

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


@ENGINES.register("megatron", check=check)
def open_megatron(job: TrainJob, ranks: Ranks) -> Engine:
    from penstock.trainer.data.images import sees_images
    from penstock.trainer.engines.megatron.engine import MegatronEngine
    from penstock.trainer.job import BadJob

    if sees_images(job.run.model):
        raise BadJob(
            f"{job.run.model} sees images, which trainer.engine megatron does not train: set trainer.engine=fsdp"
        )
    routing_replay = job.run.routing_replay
    return MegatronEngine(job.run.model, job.config, ranks, job.temperature, routing_replay=routing_replay)
