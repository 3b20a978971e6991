"""Exact attention over packed rows: each row attends to itself alone, at the cost of its own length.

On a GPU in half precision by torch's variable-length flash attention, in one kernel; elsewhere row by row: a
block-diagonal mask over the whole pack would give the same numbers, but a CPU computes every masked block, and 2,000
packed tokens of short rows then run at a third of the speed. Scores that are capped (Gemma 2) have no kernel and are
computed a tile at a time. Registered with transformers, so that any model built on its attention interface takes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from penstock.trainer.engines.fsdp.context import ContextGroup
from penstock.trainer.job import BadJob

NAME = "penstock_packed"
HALF = (torch.bfloat16, torch.float16)
"""What the kernel computes in."""

HARMLESS = frozenset(
    {
        "cu_seq_lens_k",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "use_cache",
    }
)
"""Arguments of transformers' models that reach attention and change no score."""
UNPACKABLE = {
    "attention_chunk_size": "its chunks would begin with the pack, not with the row",
    "index_topk": "the keys that its indexer chooses would be those of the pack, not of the row",
}
"""Settings of a model → why its packed rows differ from rows alone once they are longer than those that are tried."""
CAPPED_TILE = 512
"""Queries whose capped scores exist at a time."""


class UnsupportedAttention(ValueError):
    """The model asks for scores that packed attention does not compute; the message names them."""


class NoBounds(UnsupportedAttention):
    """The model's attention is called without the bounds of packed rows."""


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
    softcap: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    context: ContextGroup | None = None,
    seen: VisibleKeys | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, H, L, D], key and value [1, H_kv, L, D] → [1, L, H, D]. Raises `NoBounds` where the rows' bounds do not
    arrive, and `UnsupportedAttention` for arguments that it does not know.

    With `context`, L is this rank's part of the tokens, and the bounds are those of the whole pack. `seen`: where rows
    share their prompts. Models are loaded without dropout (`policy.load_model`).
    """
    assert dropout == 0.0
    _refuse_unknown(module, {**others, "attention_mask": attention_mask})
    if cu_seq_lens_q is None:
        raise NoBounds(f"{type(module).__name__} does not hand on the bounds of packed rows")
    if context is not None:
        query, key, value = (context.to_heads(part) for part in _even_heads(query, key, value, context.size))
    seen = seen or VisibleKeys(cu_seq_lens_q, cu_seq_lens_q)
    key, value = seen.of_runs(key), seen.of_runs(value)
    if softcap is None and query.is_cuda and query.dtype in HALF and KERNEL:
        joined = attend_by_kernel(query, key, value, seen, scaling=scaling, window=sliding_window)
    else:
        joined = attend_by_row(query, key, value, seen, scaling=scaling, window=sliding_window, softcap=softcap)
    if context is not None:
        joined = context.to_tokens(joined)
    return joined.transpose(1, 2).contiguous(), None


def _refuse_unknown(module: nn.Module, arguments: dict[str, Any]) -> None:
    """An argument that changes the scores (a mask, sinks, chosen keys) would be lost, and every gradient wrong."""
    asked = {name for name, value in arguments.items() if value is not None and name not in HARMLESS}
    if arguments.get("is_causal") is True:
        asked.discard("is_causal")
    if asked:
        names = ", ".join(sorted(asked))
        raise UnsupportedAttention(f"{type(module).__name__} calls attention with {names}, unknown to packed attention")


def _even_heads(query: Tensor, key: Tensor, value: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values repeated for every query head where `size` ranks could not share out their own heads."""
    if key.shape[1] % size == 0:
        return query, key, value
    times = query.shape[1] // key.shape[1]
    return query, key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)


@dataclass(frozen=True, slots=True)
class VisibleKeys:
    """Which keys each run's queries see: its parent's, then its own up to themselves. R runs."""

    queries: Tensor
    """[R + 1] bounds of the runs"""
    keys: Tensor
    """[R + 1] bounds of what they see, laid end to end: `queries` where no run has a parent"""
    places: Tensor | None = None
    """Where in the pack those keys are; None: as they lie."""

    @classmethod
    def of(cls, bounds: Tensor, parents: Tensor) -> VisibleKeys:
        """`Pack.row_bounds` and `Pack.parents`; once for all layers."""
        own = [torch.arange(start, end) for start, end in pairwise(bounds.tolist())]
        pairs = zip(own, parents.tolist(), strict=True)
        seen = [run if parent < 0 else torch.cat([own[parent], run]) for run, parent in pairs]
        keys = torch.tensor([0, *(len(run) for run in seen)]).cumsum(0, dtype=bounds.dtype)
        return cls(bounds, keys.to(bounds.device), torch.cat(seen).to(bounds.device))

    def of_runs(self, x: Tensor) -> Tensor:
        """Keys or values [1, H_kv, L, D] → [1, H_kv, keys[R], D]"""
        return x if self.places is None else x[:, :, self.places]


def attend_by_kernel(
    query: Tensor, key: Tensor, value: Tensor, seen: VisibleKeys, *, scaling: float | None, window: int | None
) -> Tensor:
    """All [1, heads, L, D]; the kernel wants [L, heads, D]. Its causal mask ends at the last key of the last query."""
    flat = [part[0].transpose(0, 1).contiguous() for part in (query, key, value)]
    longest = [int(bounds.diff().max()) for bounds in (seen.queries, seen.keys)]
    left = -1 if window is None else window - 1
    gqa = query.shape[1] != key.shape[1]
    found: Tensor = KERNEL(
        *flat, seen.queries, seen.keys, *longest, scale=scaling, window_size=(left, 0), enable_gqa=gqa
    )
    return found.transpose(0, 1)[None]


def attend_by_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: VisibleKeys,
    *,
    scaling: float | None,
    window: int | None,
    softcap: float | None = None,
) -> Tensor:
    keys = seen.keys.diff().tolist()
    rows = zip(query.split(seen.queries.diff().tolist(), 2), key.split(keys, 2), value.split(keys, 2), strict=True)
    if softcap is None:
        return torch.cat([_one_row(q, k, v, scaling, window) for q, k, v in rows], dim=2)
    return torch.cat([_capped_row(q, k, v, scaling=scaling, window=window, softcap=softcap) for q, k, v in rows], dim=2)


def _one_row(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """The last query sees the last key."""
    length, keys = q.shape[2], k.shape[2]
    gqa = q.shape[1] != k.shape[1]
    if length == keys and (window is None or length <= window):
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=gqa)
    seen = _seen(length, keys, window, q.device)
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling, enable_gqa=gqa)


def _seen(length: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """[length, keys]: which keys each of the last `length` places sees."""
    places = torch.arange(keys, device=device)
    distance = places[keys - length :, None] - places
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _capped_row(
    q: Tensor, k: Tensor, v: Tensor, *, scaling: float | None, window: int | None, softcap: float
) -> Tensor:
    """As `_one_row`, a tile of queries at a time, each computed again in the backward: no kernel caps scores, and a
    row's own would take H · L² numbers."""
    tile_of = partial(_capped_tile, scaling=scaling, window=window, softcap=softcap)
    end, tiles = k.shape[2] - q.shape[2], []
    for tile in q.split(CAPPED_TILE, dim=2):
        end += tile.shape[2]
        tiles.append(checkpoint(tile_of, tile, k[:, :, :end], v[:, :, :end], use_reentrant=False))
    return torch.cat(tiles, dim=2)


def _capped_tile(
    q: Tensor, k: Tensor, v: Tensor, *, scaling: float | None, window: int | None, softcap: float
) -> Tensor:
    """softmax(softcap · tanh(scaling · q·k / softcap)) · v; Gemma Team 2024, "Gemma 2" (arXiv:2408.00118), section 2"""
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~_seen(q.shape[2], k.shape[2], window, q.device), -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def use_packed_attention(model: PreTrainedModel) -> str:
    """Choose the fastest attention that is exact on packed rows for this model, by trying; returns its name.

    Raises `BadJob` where there is none.
    """
    refuse_unpackable(model)
    refusal = _refusal(model)
    try:
        model.set_attn_implementation("eager")  # sdpa leaves out caps on scores
        reference = _two_rows_alone(model)
        name, packed = _tried(model)
    except Exception as error:  # a model's own code may raise anything on arguments that it was not written for
        raise BadJob(f"{refusal}: {first_sentence(error)}") from error
    if not torch.isfinite(reference).all():
        raise BadJob(f"{type(model).__name__} cannot be trained: {_not_finite(model)}")
    if not torch.allclose(packed, reference, atol=1e-4, rtol=1e-3):
        raise BadJob(f"{refusal}: its packed rows differ from the same rows alone")
    return name


def refuse_unpackable(model: PreTrainedModel) -> None:
    """Raises `BadJob` for what the model's settings say; asks for no weights."""
    for setting, meaning in UNPACKABLE.items():
        if getattr(model.config.get_text_config(), setting, None):
            raise BadJob(f"{_refusal(model)}: {meaning} ({setting})")


def _refusal(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} cannot be trained packed by trainer.engine fsdp"


def _not_finite(model: PreTrainedModel) -> str:
    """Why its logits are not: NaN equals nothing, so that packed rows would be said to differ."""
    bad = [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()]
    if not bad:
        return "its logits are not finite although its weights are"
    rest = f" and {len(bad) - 1} more parameters" if len(bad) > 1 else ""
    return f"its weights hold NaN or infinite values, first in {bad[0]}{rest}; take a copy of the model without them"


def _tried(model: PreTrainedModel) -> tuple[str, Tensor]:
    """Only for bounds that do not arrive is transformers' own mask a substitute: it is exact, and slower."""
    try:
        model.set_attn_implementation(NAME)
        return NAME, _two_rows_packed(model)
    except NoBounds:
        model.set_attn_implementation("sdpa")
        return "sdpa", _two_rows_packed(model)


def first_sentence(error: Exception) -> str:
    """transformers follows its own with advice and lists of classes."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].split(". ")[0].rstrip(".:")


def keeps_shared_prompts(model: PreTrainedModel) -> bool:
    """Whether rows that share their prompt give what they give apart, by trying; False for another attention."""
    if model.config._attn_implementation != NAME:
        return False
    first, (*_, last) = PROBE[0], PROBE[1]
    with torch.no_grad():
        apart = _forward(model, (*first, *first[:2], last), positions=(0, 1, 2, 3, 4, 0, 1, 2), bounds=(0, 5, 8))
        shared = _forward(model, (*first, last), positions=(0, 1, 2, 3, 4, 2), bounds=(0, 2, 5, 6), parents=(-1, 0, 0))
    return torch.allclose(shared, apart[[0, 1, 2, 3, 4, 7]], atol=1e-4, rtol=1e-3)


def row_bounds_arguments(row_bounds: Tensor, parents: Tensor | None = None) -> dict[str, Any]:
    """The keyword arguments by which transformers hands packed rows' bounds to attention."""
    longest = int(row_bounds.diff().max())
    arguments: dict[str, Any] = {
        "cu_seq_lens_q": row_bounds,
        "cu_seq_lens_k": row_bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    return arguments if parents is None else {**arguments, "seen": VisibleKeys.of(row_bounds, parents)}


PROBE = ((1, 2, 3, 4, 5), (5, 3, 1))


@torch.no_grad()
def _two_rows_alone(model: PreTrainedModel) -> Tensor:
    return torch.cat([_forward(model, row) for row in PROBE])


@torch.no_grad()
def _two_rows_packed(model: PreTrainedModel) -> Tensor:
    first, second = PROBE
    edge = len(first)
    positions = (*range(edge), *range(len(second)))
    return _forward(model, (*first, *second), positions=positions, bounds=(0, edge, edge + len(second)))


def _forward(
    model: PreTrainedModel,
    ids: tuple[int, ...],
    *,
    positions: tuple[int, ...] | None = None,
    bounds: tuple[int, ...] = (),
    parents: tuple[int, ...] = (),
) -> Tensor:
    """Logits [L, V] of one pack; with neither positions nor bounds: of one row, as anybody would call the model."""
    arguments: dict[str, Any] = {"input_ids": torch.tensor([ids]), "use_cache": False}
    if positions is not None:
        arguments["position_ids"] = torch.tensor([positions])
        edges = torch.tensor(bounds, dtype=torch.int32)
        arguments |= row_bounds_arguments(edges, torch.tensor(parents) if parents else None)
    return model(**arguments).logits[0]


AttentionInterface.register(NAME, packed_attention)
