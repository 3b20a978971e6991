"""The most bytes that a rank holds in a backward: memory_ranks.py RANKS FOLDER CASES.

CASES is JSON: name → `model`, `config` of the trainer and `tokens` of a pack, which each copy of the model has twice.
Prints one line of JSON: `cases`, by name

peak_bytes        of the rank with the most, above weights and moments, as torch's allocator records them
shard_bytes       of its gradients among them
exchanged_bytes   of floating-point numbers in all-to-alls, over all ranks, those too that stay on their rank

and the size of a `tile` of logits. These exist in tiles of a GPU's size, and gloo works outside of torch's allocator,
as NCCL does: it would copy what it reduces.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from benchmarks.support.context_step import pack_of
from benchmarks.support.forked_ranks import forked_ranks
from benchmarks.support.meter import Meter
from penstock.trainer import Ranks, TrainerConfig
from penstock.trainer.engines.fsdp import FSDPEngine, local_part
from penstock.trainer.engines.fsdp.mesh import mesh_of
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


@contextmanager
def exchanged_bytes() -> Iterator[list[int]]:
    """Bytes of floating-point numbers that this rank gives to each all-to-all, those too that stay on it."""
    counted: list[int] = []
    plain = dist.all_to_all_single

    def count(received: Tensor, sent: Tensor, *args: Any, **kwargs: Any) -> None:
        if sent.is_floating_point():
            counted.append(sent.nbytes)
        plain(received, sent, *args, **kwargs)

    with patch("torch.distributed.all_to_all_single", count):
        yield counted


def measure(case: Mapping[str, Any], everyone: Ranks) -> dict[str, int]:
    config = TrainerConfig(**case["config"])
    ranks = Ranks(everyone.device, everyone.background, config.parallel.layout, everyone.timeout)
    engine = FSDPEngine(case["model"], config, ranks)
    for part in engine.policy.modules():
        if isinstance(part, FSDPModule) and ranks.world > 1:
            part.set_custom_all_gather(AllGather())
            part.set_custom_reduce_scatter(ReduceScatter())
    pack = pack_of(2, case["tokens"], 64)
    loss = lambda _, outputs: outputs.logprobs.sum()  # noqa: E731
    engine.update([pack], loss, 1.0, 0)  # moments are there from here on
    gc.collect()
    with exchanged_bytes() as exchanged, Meter(memory=True, device=torch.device("cpu")) as meter:
        engine.accumulate([pack, pack], loss, 1.0)
    shard = sum(local_part(one)[0].nbytes for one in engine.policy.parameters() if one.requires_grad)
    ranks.own(mesh_of).close()
    return {
        "peak_bytes": int(everyone.max(meter.peak_bytes)),
        "shard_bytes": int(everyone.max(shard)),
        "exchanged_bytes": int(everyone.sum(sum(exchanged))),
    }


def main(count: int, folder: Path, cases: Mapping[str, Any]) -> None:
    with forked_ranks(count, folder) as ranks, patch("penstock.trainer.logprobs.CPU_TILE_ELEMENTS", GPU_TILE_ELEMENTS):
        found = {name: measure(case, ranks) for name, case in cases.items()}
        if ranks.is_rank0:
            print(json.dumps({"cases": found, "tile": [GPU_TILE_ELEMENTS, VOCAB_TILE]}))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
