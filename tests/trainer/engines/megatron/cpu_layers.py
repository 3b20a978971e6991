"""What Transformer Engine's layers do and megatron-core's own do not, on CPU tensors, for tests alone.

Packed rows over context ranks, and experts that tensor ranks have whole. Slow, plain and exact.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor

ENGINE = "penstock.trainer.engines.megatron"


class GatheringAttention(torch.nn.Module):
    """Causal attention of each row to itself; every context rank has the keys and values of all."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *masks: Any, packed_seq_params: Any, **settings: Any
    ) -> Tensor:
        """query [t, heads, D]; key, value [t, groups, D] of this rank → [t, heads · D]"""
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        group = parallel_state.get_context_parallel_group()
        bounds = packed_seq_params.cu_seqlens_q_padded.long()
        by_rank = _places(bounds.tolist(), group.size())
        mine, every = by_rank[group.rank()], torch.cat(by_rank)
        heads = query.shape[1] // key.shape[1]
        key, value = (
            gather_from_sequence_parallel_region(one.contiguous(), group=group).repeat_interleave(heads, dim=1)
            for one in (key, value)
        )
        row_of = torch.bucketize(every, bounds, right=True)
        hidden = (torch.bucketize(mine, bounds, right=True)[:, None] != row_of) | (mine[:, None] < every)
        scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def _places(bounds: list[int], contexts: int) -> list[Tensor]:
    """By context rank: where in the whole pack each of its tokens is."""
    found = []
    for context in range(contexts):
        parts = []
        for start, end in pairwise(bounds):
            pieces = torch.arange(start, end).chunk(2 * contexts)
            parts += [pieces[context], pieces[2 * contexts - 1 - context]]
        found.append(torch.cat(parts))
    return found


@contextlib.contextmanager
def context_parallelism() -> Iterator[None]:
    """Packed rows, in float32 too, where `trainer.parallel.context` is at least 2."""
    with (
        mock.patch("megatron.core.models.backends.DotProductAttention", GatheringAttention),
        mock.patch(f"{ENGINE}.settings.takes_packed_rows", return_value=True),
        mock.patch(f"{ENGINE}.engine.takes_packed_rows", return_value=True),
    ):
        yield


@contextlib.contextmanager
def whole_experts() -> Iterator[None]:
    """Each rank reads its experts from the file, since mbridge cuts experts of megatron-core's own layers over tensor
    ranks."""
    from penstock.trainer.engines.megatron.bridge import ModelBridge

    original = ModelBridge.load

    @torch.no_grad()
    def load(self: Any, models: list[Any], folder: Path) -> None:
        bridge = self._bridge
        names = bridge._weight_name_mapping_mcore_local_to_global

        def without_experts(model: Any, consider_ep: bool = True) -> dict[str, str]:
            return {local: name for local, name in names(model, consider_ep).items() if "local_experts" not in local}

        with mock.patch.object(bridge, "_weight_name_mapping_mcore_local_to_global", without_experts):
            original(self, models, folder)
        tensors = load_file(Path(folder) / "model.safetensors")
        for model in models:
            state = model.state_dict()
            for local, name in names(model).items():
                if "local_experts" in local:
                    given = [tensors[one] for one in bridge._weight_name_mapping_mcore_to_hf(name)]
                    state[local].copy_(bridge._weight_to_mcore_format(name, given))

    with mock.patch.object(ModelBridge, "load", load):
        yield
