"""Exact attention over packed rows: each row attends to itself alone, at the cost of its own length.

On a GPU in half precision by torch's variable-length flash attention, in one kernel; elsewhere row by row: a
block-diagonal mask over the whole pack would give the same numbers, but a CPU computes every masked block, and 2,000
packed tokens of short rows then run at a third of the speed. Registered with transformers, so that any model built on
its attention interface takes it.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from penstock.trainer.context import Context

NAME = "penstock_packed"
HALF = (torch.bfloat16, torch.float16)
"""What the kernel computes in."""


def _kernel() -> Any:
    """torch's ``varlen_attn``; None where it does not take grouped heads and windows yet, or is not built."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"enable_gqa", "window_size"} <= signature(varlen_attn).parameters.keys() else None


KERNEL = _kernel()


@torch.compiler.disable  # lengths of rows are read on the host: a compiled layer is cut here
def packed_attention(  # noqa: PLR0917 - the order is that of transformers' interface
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    context: Context | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, H, L, D], key and value [1, H_kv, L, D] → [1, L, H, D]. Raises where the rows' bounds do not arrive.

    With `context`, L is this rank's part of the tokens, and the bounds are those of the whole pack. Models are loaded
    without dropout (`policy.load_model`).
    """
    assert dropout == 0.0
    if cu_seq_lens_q is None:
        raise NotImplementedError(f"{type(module).__name__} does not hand on the bounds of packed rows")
    if context is not None:
        query, key, value = (context.to_heads(part) for part in _even_heads(query, key, value, context.size))
    attend = _by_kernel if query.is_cuda and query.dtype in HALF and KERNEL else _row_by_row
    joined = attend(query, key, value, cu_seq_lens_q, scaling=scaling, window=sliding_window)
    if context is not None:
        joined = context.to_tokens(joined)
    return joined.transpose(1, 2).contiguous(), None


def _even_heads(query: Tensor, key: Tensor, value: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values repeated for every query head where `size` ranks could not share out their own heads."""
    if key.shape[1] % size == 0:
        return query, key, value
    times = query.shape[1] // key.shape[1]
    return query, key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *, scaling: float | None, window: int | None
) -> Tensor:
    """All [1, heads, L, D]; the kernel wants [L, heads, D]."""
    longest = int(bounds.diff().max())
    flat = [part[0].transpose(0, 1).contiguous() for part in (query, key, value)]
    left = -1 if window is None else window - 1
    gqa = query.shape[1] != key.shape[1]
    found: Tensor = KERNEL(
        *flat, bounds, bounds, longest, longest, scale=scaling, window_size=(left, 0), enable_gqa=gqa
    )
    return found.transpose(0, 1)[None]


def _row_by_row(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *, scaling: float | None, window: int | None
) -> Tensor:
    lengths = bounds.diff().tolist()
    rows = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    return torch.cat([_one_row(q, k, v, scaling, window) for q, k, v in rows], dim=2)


def _one_row(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
    length = q.shape[2]
    gqa = q.shape[1] != k.shape[1]
    if window is None or length <= window:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=gqa)
    distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    band = (distance >= 0) & (distance < window)
    return scaled_dot_product_attention(q, k, v, attn_mask=band, scale=scaling, enable_gqa=gqa)


def use_packed_attention(model: PreTrainedModel) -> str:
    """Choose the fastest attention that is exact on packed rows for this model, by trying; returns its name.

    Raises `ValueError` where neither ours nor transformers' own mask keeps rows apart.
    """
    model.set_attn_implementation("sdpa")
    reference = _two_rows_alone(model)
    for name in (NAME, "sdpa"):
        model.set_attn_implementation(name)
        try:
            packed = _two_rows_packed(model)
        except NotImplementedError:
            continue
        if torch.allclose(packed, reference, atol=1e-4, rtol=1e-3):
            return name
    raise ValueError(f"{type(model).__name__} lets packed rows see each other; it cannot be trained packed")


def row_bounds_arguments(row_bounds: Tensor) -> dict[str, Any]:
    """The keyword arguments by which transformers hands packed rows' bounds to attention."""
    longest = int(row_bounds.diff().max())
    return {
        "cu_seq_lens_q": row_bounds,
        "cu_seq_lens_k": row_bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


PROBE = ((1, 2, 3, 4, 5), (5, 3, 1))


@torch.no_grad()
def _two_rows_alone(model: PreTrainedModel) -> Tensor:
    logits = [model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in PROBE]
    return torch.cat(logits)


@torch.no_grad()
def _two_rows_packed(model: PreTrainedModel) -> Tensor:
    first, second = PROBE
    bounds = torch.tensor([0, len(first), len(first) + len(second)], dtype=torch.int32)
    positions = torch.tensor([[*range(len(first)), *range(len(second))]])
    ids = torch.tensor([[*first, *second]])
    arguments = row_bounds_arguments(bounds)
    return model(input_ids=ids, position_ids=positions, use_cache=False, **arguments).logits[0]


AttentionInterface.register(NAME, packed_attention)
