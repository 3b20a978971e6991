"""Exact attention over packed rows: each row attends to itself alone, at the cost of its length.

On a GPU in half precision by torch's variable-length flash attention, in one kernel; elsewhere row by row: a
block-diagonal mask over the whole pack would give the same numbers, but a CPU computes every masked block, and 2,000
packed tokens of short rows then run at a third of the speed. Scores that are capped (Gemma 2) or have sinks (gpt-oss),
and heads of more than 256 numbers (Gemma 4), have no kernel and are computed a tile at a time. Registered with
transformers, so that any model built on its attention interface takes it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from penstock.trainer.engines.fsdp.context import ContextGroup
from penstock.trainer.packing import on_device

NAME = "penstock_packed"
HALF = (torch.bfloat16, torch.float16)
"""Dtypes in which the kernel computes."""

HARMLESS = frozenset(
    {
        "cu_seq_lens_k",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "seq_idx",
        "use_cache",
    }
)
"""Arguments of transformers' models that reach attention and change no score."""
QUERY_TILE = 512
"""Queries whose scores exist at a time where no kernel computes them."""


class UnsupportedAttention(ValueError):
    """The model asks for scores that packed attention does not compute; the message names them."""


class NoBounds(UnsupportedAttention):
    """The model's attention is called without the bounds of packed rows."""


def _kernel() -> Any:
    """torch's ``varlen_attn``; None if it does not take grouped heads and windows yet, or is not built."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"enable_gqa", "window_size"} <= signature(varlen_attn).parameters.keys() else None


KERNEL = _kernel()
MOST_HEAD = 256
"""Largest size of a head that kernels on GPUs compute."""


@torch.compiler.disable  # every pack has other lengths of rows: a compiled layer is cut here
def packed_attention(  # noqa: PLR0917 - the order is that of transformers' interface
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    context: ContextGroup | None = None,
    seen: VisibleKeys | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, H, L, D], key and value [1, H_kv, L, D] → [1, L, H, D]. Raises `NoBounds` where the rows' bounds do not
    arrive, and `UnsupportedAttention` for arguments that it does not know.

    With `context`, L is this rank's part of the tokens, and the bounds are those of the whole pack. `seen`: made once
    for all layers; None: it is read from the bounds, and the host waits for the device. `s_aux`: [H] sinks. Models are
    loaded without dropout (`models.load_model`).
    """
    assert dropout == 0.0
    _refuse_unknown(module, {**others, "attention_mask": attention_mask})
    if cu_seq_lens_q is None:
        raise NoBounds(f"{type(module).__name__} does not hand on the bounds of packed rows")
    if context is not None:
        if key.shape[1] % context.size:  # the ranks could not share out the heads of keys and values
            times = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
        query, key, value = (context.to_heads(part) for part in (query, key, value))
        s_aux = None if s_aux is None else s_aux.chunk(context.size)[context.rank]
    seen = seen or VisibleKeys.of(cu_seq_lens_q, cu_seq_lens_q.diff())
    key, value = seen.of_runs(key), seen.of_runs(value)
    plain = softcap is None and s_aux is None and max(query.shape[-1], value.shape[-1]) <= MOST_HEAD
    if plain and query.is_cuda and query.dtype in HALF and KERNEL:
        joined = attend_by_kernel(query, key, value, seen, scaling=scaling, window=sliding_window)
    else:
        joined = attend_by_row(
            query, key, value, seen, scaling=scaling, window=sliding_window, softcap=softcap, sinks=s_aux
        )
    if context is not None:
        joined = context.to_tokens(joined)
    return joined.transpose(1, 2).contiguous(), None


def _refuse_unknown(module: nn.Module, arguments: dict[str, Any]) -> None:
    """An argument that changes the scores (a mask, chosen keys) would be lost, and every gradient wrong."""
    unknown = {name for name, value in arguments.items() if value is not None and name not in HARMLESS}
    if arguments.get("is_causal") is True:
        unknown.discard("is_causal")
    if unknown:
        names = ", ".join(sorted(unknown))
        raise UnsupportedAttention(f"{type(module).__name__} calls attention with {names}, unknown to packed attention")


@dataclass(frozen=True, slots=True)
class VisibleKeys:
    """Which keys each run's queries see: those of the row that it continues, then its own up to themselves. R runs.

    Made once for all layers. Lengths are numbers of the host: one that a layer read from a tensor would stop the host
    until the device has computed all that was asked of it.
    """

    queries: Tensor
    """[R + 1] int32, bounds of the runs"""
    keys: Tensor
    """[R + 1] int32, bounds of what they see, laid end to end: `queries` where every run is a row"""
    query_lengths: Sequence[int]
    """[R] tokens of the runs"""
    key_lengths: Sequence[int]
    """[R] keys that they see"""
    places: Tensor | None = None
    """Places of those keys in the pack; None: in order."""

    @classmethod
    def of(cls, bounds: Tensor, lengths: Tensor, forks: Tensor | None = None) -> VisibleKeys:
        """`Pack.row_bounds`, `run_lengths` and `forks`; waits for no device where the latter two are on the host."""
        read = tuple(lengths.tolist())
        if forks is None:
            return cls(bounds, bounds, read, read)
        ends, seen = list(accumulate(read)), list[Tensor]()
        for own, fork in zip(torch.arange(sum(read)).split(read), forks.tolist(), strict=True):
            source = bisect_right(ends, fork)
            after = ends[source] - fork - 1  # tokens of that run that this one does not continue
            seen.append(own if fork < 0 else torch.cat([seen[source][: len(seen[source]) - after], own]))
        keys = torch.tensor([0, *map(len, seen)]).cumsum(0, dtype=bounds.dtype)
        keys, places = on_device(keys, bounds.device), on_device(torch.cat(seen), bounds.device)
        return cls(bounds, keys, read, tuple(map(len, seen)), places)

    def of_runs(self, x: Tensor) -> Tensor:
        """Keys or values [1, H_kv, L, D] → [1, H_kv, keys[R], D]"""
        return x if self.places is None else x[:, :, self.places]


def attend_by_kernel(
    query: Tensor, key: Tensor, value: Tensor, seen: VisibleKeys, *, scaling: float | None, window: int | None
) -> Tensor:
    """All [1, heads, L, D]; the kernel wants [L, heads, D]. Its causal mask ends at the last key of the last query.

    It takes heads of one size, a multiple of 8: those of values may have another one (DeepSeek-V3's latent attention),
    and zeros fill up.
    """
    scaling, width = query.shape[-1] ** -0.5 if scaling is None else scaling, value.shape[-1]
    size = -(-max(query.shape[-1], width) // 8) * 8
    flat = [_filled_up(part[0].transpose(0, 1), size).contiguous() for part in (query, key, value)]
    longest = max(seen.query_lengths), max(seen.key_lengths)
    window_left = -1 if window is None else window - 1
    gqa = query.shape[1] != key.shape[1]
    output: Tensor = KERNEL(
        *flat, seen.queries, seen.keys, *longest, scale=scaling, window_size=(window_left, 0), enable_gqa=gqa
    )
    return output[..., :width].transpose(0, 1)[None]


def _filled_up(x: Tensor, size: int) -> Tensor:
    """[…, D] → […, size]"""
    return x if x.shape[-1] == size else nn.functional.pad(x, (0, size - x.shape[-1]))


def attend_by_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: VisibleKeys,
    *,
    scaling: float | None,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    queries, keys = list(seen.query_lengths), list(seen.key_lengths)
    rows = zip(query.split(queries, 2), key.split(keys, 2), value.split(keys, 2), strict=True)
    if softcap is None and sinks is None and max(query.shape[-1], value.shape[-1]) <= MOST_HEAD:
        return torch.cat([_one_row(q, k, v, scaling, window) for q, k, v in rows], dim=2)
    tile_of = partial(_tile, scaling=scaling, window=window, softcap=softcap)
    return torch.cat([_row_in_tiles(tile_of, q, k, v, sinks, window=window) for q, k, v in rows], dim=2)


def _one_row(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """The last query sees the last key."""
    length, keys = q.shape[2], k.shape[2]
    gqa = q.shape[1] != k.shape[1]
    if length == keys and (window is None or length <= window):
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=gqa)
    seen = _visible_mask(length, keys, window, q.device)
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling, enable_gqa=gqa)


def _visible_mask(length: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """[length, keys]: which keys each of the last `length` places sees."""
    places = torch.arange(keys, device=device)
    distance = places[keys - length :, None] - places
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _row_in_tiles(
    tile_of: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, window: int | None
) -> Tensor:
    """Compute `_one_row` a tile of queries at a time, each computed again in the backward: a row's own scores would
    take H · L² numbers."""
    end, tiles = k.shape[2] - q.shape[2], []
    for tile in q.split(QUERY_TILE, dim=2):
        end += tile.shape[2]
        keys = slice(0 if window is None else max(0, end - tile.shape[2] - window + 1), end)
        inputs = (tile, k[:, :, keys], v[:, :, keys], sinks)
        tiles.append(checkpoint(tile_of, *inputs, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(tiles, dim=2)


def _tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """softmax(scores) · v, with scores = c · tanh(scaling · q·k / c) if capped: Gemma Team 2024, "Gemma 2"
    (arXiv:2408.00118), section 2. A head's sink is one more score, whose share has no value: Xiao et al. 2024
    (arXiv:2309.17453), section 3.3."""
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~_visible_mask(q.shape[2], k.shape[2], window, q.device), -torch.inf)
    if sinks is not None:
        of_head = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, of_head], dim=-1)
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype)[..., : k.shape[2]] @ v


AttentionInterface.register(NAME, packed_attention)
