"""Under HSDP several sets of ranks hold all shards: are they copies of one another? Asked at the start.

Every set gets the same gradients, so weights that differ once differ for ever, and each set's rows are trained with its
own. Nothing else would say so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor, nn

from penstock.trainer.engines.fsdp.shell import local_part
from penstock.trainer.job import BadJob
from penstock.trainer.ranks.distributed import Ranks

PIECE = 1 << 24
"""Values that are on the host at a time."""


def check_copies(modules: Sequence[nn.Module], ranks: Ranks) -> None:
    """A collective. Raises `BadJob` on all ranks where two that hold the same shards hold other values."""
    replicate = ranks.layout.replicate
    if replicate == 1:
        return
    digests = [
        [name, _digest(local_part(parameter)[0])] for module in modules for name, parameter in module.named_parameters()
    ]
    held = ranks.gather(digests)
    each = ranks.world // replicate
    for rank in range(each, ranks.world):
        for (name, expected), (_, found) in zip(held[rank % each], held[rank], strict=True):
            if found != expected:
                raise BadJob(
                    f"trainer.parallel.replicate is {replicate}, and ranks {rank % each} and {rank}, which hold the "
                    f"same shard of {name}, have other values of it: the model's files are not the same on all "
                    "machines. Copy the folder to each anew"
                )


@torch.no_grad()
def _digest(local: Tensor) -> str:
    digest = xxhash.xxh3_64()
    for piece in local.reshape(-1).split(PIECE):
        digest.update(piece.cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
