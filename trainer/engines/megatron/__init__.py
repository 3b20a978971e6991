"""Engine `megatron`: megatron-core, for models that need tensor, pipeline, context or expert parallelism.

Hugging Face folder ⇄ mbridge ⇄ megatron-core's GPTModel in stages ── DistributedDataParallel ── distributed optimizer

engine.py     the engine itself: score, update, weights
bridge.py     one mbridge bridge: model and weights by Hugging Face's names
layers.py     the layers without Transformer Engine, and what mbridge must know of them
inputs.py     a pack as rows in a rectangle, or packed and cut over context ranks
head.py       logprobs and entropy from hidden states; the head is split over the vocabulary
stages.py     packs through the pipeline, what the last stage says to all stages
learning.py   the distributed optimizer: clip, skip, step
arithmetic.py how much arithmetic the model is
moments.py    masters and moments as full tensors of their parameters
state.py      checkpoints by Hugging Face's names, whatever the layout
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.trainer.engines import ENGINES
from penstock.trainer.engines.megatron.settings import check

if TYPE_CHECKING:
    from penstock.trainer.engine import Engine
    from penstock.trainer.job import TrainJob
    from penstock.trainer.ranks import Ranks


@ENGINES.register("megatron", check=check)
def open_megatron(job: TrainJob, ranks: Ranks) -> Engine:
    from penstock.trainer.engines.megatron.engine import MegatronEngine

    return MegatronEngine(job.model, job.config, ranks, job.temperature)
