"""What each FSDP rank publishes of mixtures of experts: expert_ranks.py RANKS FOLDER MODEL...

Each rank checks its own part. Rank 0 fetches the stream bucket by bucket, compares it with the gathered tensors and
leaves FOLDER/shares.json: by model, the bytes that each rank holds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from parallel_ranks import become_ranks
from torch.distributed.tensor import DTensor

from penstock.trainer import Ranks, TrainerConfig
from penstock.trainer.engines.fsdp import FSDPEngine
from penstock.weight_sync import Shard, WeightSource

BUCKETS = (1000, 7777, 1 << 20)
"""Bytes."""


def check_shards(engine: FSDPEngine, shards: Sequence[Shard], ranks: Ranks) -> None:
    """They are views of what FSDP holds on this rank, all of it once; every tensor of an expert is one rank's."""
    held = [one.to_local() for one in engine.policy.model.parameters() if isinstance(one, DTensor)]
    storages = {one.untyped_storage().data_ptr() for one in held}
    filled = [shard.local for shard in shards if shard.local.numel()]
    assert {one.untyped_storage().data_ptr() for one in filled} <= storages, "nothing is copied or gathered"
    assert sum(one.numel() for one in filled) == sum(one.numel() for one in held)
    for shard in shards:
        assert len(shard.rank_bytes) == ranks.world
        assert sum(shard.rank_bytes) == torch.Size(shard.shape).numel() * shard.published.itemsize
        assert shard.local.numel() * shard.published.itemsize == shard.rank_bytes[ranks.rank]
        if ".experts." in shard.name:
            assert sorted(shard.rank_bytes)[:-1] == [0] * (ranks.world - 1), shard.name


def check_stream(source: WeightSource, weights: dict[str, torch.Tensor]) -> None:
    assert sorted(tensor.name for tensor in source.tensors) == sorted(weights)
    for bucket_bytes in BUCKETS:
        stream = torch.cat([bucket.clone() for bucket in source.buckets(1, bucket_bytes)])
        for tensor, piece in zip(source.tensors, stream.split([t.nbytes for t in source.tensors]), strict=True):
            expected = weights[tensor.name]
            assert torch.equal(piece.view(torch.bfloat16).view(tensor.shape), expected), tensor.name


def shares_of(model: str, ranks: Ranks) -> list[int]:
    """Bytes by rank."""
    engine = FSDPEngine(model, TrainerConfig(), ranks)
    source = WeightSource.open(ranks.rank, ranks.world, ranks.timeout)
    shards = engine.local_shards(torch.bfloat16)
    assert shards is not None
    check_shards(engine, shards, ranks)
    shares = [sum(shard.rank_bytes[rank] for shard in shards) for rank in range(ranks.world)]
    source.take(1, shards)
    assert source._bytes.nbytes == shares[ranks.rank]
    weights = dict(engine.weights(torch.bfloat16))
    if ranks.is_rank0:
        check_stream(source, weights)
    source.close()
    return shares


def main(folder: Path, models: list[str]) -> None:
    ranks = Ranks.open(120.0)
    try:
        found = {model: shares_of(model, ranks) for model in models}
        if ranks.is_rank0:
            (folder / "shares.json").write_text(json.dumps(found))
    finally:
        ranks.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if become_ranks(int(sys.argv[1])):
        main(Path(sys.argv[2]), sys.argv[3:])
