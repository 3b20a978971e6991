"""Ranks that report the most bytes of a backward: memory_ranks.py RANKS FOLDER CASES.

CASES is JSON: name → `model`, `config` of the trainer and `tokens` of a pack. Rank 0 leaves FOLDER/peaks.json: `peaks`,
name → bytes above weights and moments, as torch's allocator reports them, and the size of a `tile` of logits. These
exist in tiles of a GPU's size, and gloo works outside of torch's allocator, as NCCL does: it would copy what it
reduces.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from forked_ranks import fork_ranks
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from trainer_support import one_pack

from benchmarks.support.meter import Meter
from penstock.trainer import Ranks, TrainerConfig
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.trainer.engines.fsdp.sharded import mesh_of
from penstock.trainer.logprobs import GPU_TILE_ELEMENTS, VOCAB_TILE


class AllGather(DefaultAllGather):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        gathered = outside(output_tensor)
        dist.all_gather_into_tensor(gathered, outside(input_tensor), group=group)
        output_tensor.copy_(gathered)


class ReduceScatter(DefaultReduceScatter):
    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        summed = outside(input_tensor)
        dist.all_reduce(summed, op, group=group)
        output_tensor.copy_(summed.chunk(group.size())[group.rank()])


def outside(tensor: Tensor) -> Tensor:
    """A copy in numpy's memory."""
    return torch.from_numpy(np.empty(tensor.nbytes, np.uint8)).view(tensor.dtype).copy_(tensor)


def peak_bytes(case: Mapping[str, Any], everyone: Ranks) -> int:
    config = TrainerConfig(**case["config"])
    ranks = Ranks(everyone.device, everyone.background, config.parallel.layout, everyone.timeout)
    engine = FSDPEngine(case["model"], config, ranks)
    for part in engine.policy.modules():
        if isinstance(part, FSDPModule) and ranks.world > 1:
            part.set_custom_all_gather(AllGather())
            part.set_custom_reduce_scatter(ReduceScatter())
    pack = one_pack(case["tokens"], 64)
    loss = lambda _, outputs: outputs.logprobs.sum()  # noqa: E731
    engine.update([pack], loss, 1.0, 0)  # moments are there from here on
    gc.collect()
    with Meter(memory=True, device=torch.device("cpu")) as meter:
        engine._actor.accumulate([pack, pack], loss, 1.0)
    ranks.own(mesh_of).close()
    return meter.peak_bytes


def main(folder: Path, cases: Mapping[str, Any]) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.open(120.0)
    try:
        with patch("penstock.trainer.logprobs.CPU_TILE_ELEMENTS", GPU_TILE_ELEMENTS):
            found = {name: peak_bytes(case, ranks) for name, case in cases.items()}
        if ranks.is_rank0:
            report = {"peaks": found, "tile": [GPU_TILE_ELEMENTS, VOCAB_TILE]}
            (folder / "peaks.json").write_text(json.dumps(report))
    finally:
        ranks.close()


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    running = fork_ranks(int(sys.argv[1]), folder / "log", lambda: main(folder, json.loads(sys.argv[3])))
    sys.exit(any([os.waitpid(pid, 0)[1] for pid in running]))
