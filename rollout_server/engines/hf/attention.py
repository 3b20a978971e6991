"""Attention of the hf engine: the rows of a bucket as one padded batch, and no argument left out.

All tokens of a pass go through the model as one sequence [1, Q]; only attention knows which request each belongs to.
`ForwardStep.attend` writes the new keys and values into the cache and lets runs of neighbouring rows with equally many
new tokens attend together, to the columns of their bucket: one call per layer where all requests decode.

Models are loaded with `NAME` as their attention. Its masks are those of ``sdpa``. Capped scores (Gemma 2) are computed
here, because transformers' ``sdpa`` ignores the cap. Any other argument that could
change a score is refused: if it were ignored, every logprob would differ from the trainer's. Calls without a
`ForwardStep` (vision-language models, plain passes) are transformers' own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from penstock.rollout_server.engines.hf.cache import Bucket, KVCache, Layout, Row

NAME = "penstock_by_request"
"""Name of this attention in transformers' registry."""
HARMLESS = frozenset(
    {
        "logits_indices",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "use_cache",
    }
)
"""Arguments of transformers' models that reach attention and change no score."""


class UnsupportedArguments(ValueError):
    """The model asks for scores that the hf engine does not compute; the message names the arguments."""


@dataclass(slots=True)
class Run:
    """Neighbouring rows of a bucket, each with `new` tokens."""

    bucket: Bucket
    rows: list[Row]
    new: int
    start: int
    """Position of its first token in the pass."""
    longest: int
    """Columns that are read."""
    biases: dict[tuple[int | None, int], torch.Tensor | None] = field(default_factory=dict)
    """(window, groups) → what is added to scores."""

    @property
    def first(self) -> int:
        return self.rows[0].index

    @property
    def is_fresh(self) -> bool:
        """Several tokens per row, and nothing before them."""
        return self.new > 1 and not self.rows[0].fed

    def bias(self, window: int | None, groups: int, dtype: torch.dtype) -> torch.Tensor | None:
        """[rows, 1, 1 | groups · new, longest]: 0 where a token sees a column, else −inf; None where all see all."""
        key = (window, groups if self.new > 1 else 1)
        if key not in self.biases:
            self.biases[key] = self._bias(*key, dtype)
        return self.biases[key]

    def _bias(self, window: int | None, groups: int, dtype: torch.dtype) -> torch.Tensor | None:
        columns = torch.arange(self.longest)
        at = torch.tensor([row.fed for row in self.rows]).view(-1, 1, 1, 1) + torch.arange(self.new).view(-1, 1)
        unseen = columns > at
        if window is not None:
            unseen |= columns <= at - window
        if not unseen.any():
            return None
        return torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, -torch.inf).repeat(1, 1, groups, 1)


class ForwardStep:
    """One forward pass over the rows that have `new` tokens."""

    def __init__(self, cache: KVCache) -> None:
        self._layout = cache.layout
        self.runs: list[Run] = []
        self.ids: list[int] = []
        """Ids of all tokens, run after run."""
        self.positions: list[int] = []
        self._writes: list[tuple[Bucket, slice, torch.Tensor]] = []
        """Bucket, its part of the tokens, and where in the bucket's planes, rows and columns as one, each goes."""
        for bucket in cache.buckets:
            self._add(bucket)

    @property
    def rows(self) -> Iterator[Row]:
        return (row for run in self.runs for row in run.rows)

    def _add(self, bucket: Bucket) -> None:
        start, places = len(self.ids), list[int]()
        for (new, *_), group in groupby(bucket.rows, lambda row: (row.new, row.new > 1 and not row.fed)):
            if not new:
                continue
            rows = list(group)
            longest = max(row.fed for row in rows) + new
            self.runs.append(Run(bucket, rows, new, len(self.ids), longest))
            for row in rows:
                self.ids += row.ids[row.fed : row.fed + new]
                self.positions += range(row.fed, row.fed + new)
                first = row.index * bucket.capacity + row.fed
                places += range(first, first + new)
        if places:
            self._writes.append((bucket, slice(start, len(self.ids)), torch.tensor(places)))

    def last_tokens(self, rows: list[Row]) -> torch.Tensor:
        """[rows] places of their last tokens in the pass; `rows` are some of the step's, in its order."""
        chosen, ends, end = {id(row) for row in rows}, [], 0
        for row in self.rows:
            end += row.new
            if id(row) in chosen:
                ends.append(end - 1)
        return torch.tensor(ends, dtype=torch.long)

    def attend(  # noqa: PLR0917
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        softcap: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """query [1, H, Q, D]; key, value [1, KV, Q, D]. Returns [1, Q, H, D]."""
        keys, values = self._layout.keys[layer], self._layout.values[layer]
        for bucket, tokens, places in self._writes:
            for (tensor, plane), source in ((keys, key), (values, value)):
                bucket.planes[tensor][plane].flatten(0, 1).index_copy_(0, places, source[0].transpose(0, 1)[tokens])
        by_token, outputs = query[0].transpose(0, 1), []
        for run in self.runs:
            seen = slice(run.first, run.first + len(run.rows)), slice(run.longest)
            k, v = (run.bucket.planes[tensor][plane][seen].transpose(1, 2) for tensor, plane in (keys, values))
            tokens = slice(run.start, run.start + len(run.rows) * run.new)
            outputs.append(_attend(run, by_token[tokens], k, v, scale, softcap, window))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)


class Probe:
    """Stands for a `ForwardStep` in a pass that finds out which layers attend, and with which shapes. Sees no mask."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[torch.Size, torch.Size]] = {}
        self.windows: dict[int, int | None] = {}
        self.dtype = torch.float32

    def attend(  # noqa: PLR0917
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        softcap: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Zeros, in the shape of an answer."""
        self.windows[layer] = window
        self.shapes[layer], self.dtype = (key.shape, value.shape), key.dtype
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def layout(self) -> Layout:
        """Layout of the cache. Raises `UnsupportedArguments` if no layer attended."""
        if not self.shapes:
            raise UnsupportedArguments(f"the model has no attention that the hf engine knows: {USE_ANOTHER}")
        return Layout(self.shapes, self.dtype)


USE_ANOTHER = "set rollout.engine to vllm or sglang"


def attend_by_request(  # noqa: PLR0917 (the signature is transformers')
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    step: ForwardStep | Probe | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, Q, D]; key, value [1, KV, Q, D]: the tokens of `step`, end to end. Returns [1, Q, H, D].

    `attention_mask` counts without a `step` only, and then holds windows too.

    Raises:
        UnsupportedArguments: an argument that could change scores is not known here.
    """
    _refuse_unknown(module, others)
    if step is not None:
        _refuse_unknown(module, {"position_bias": position_bias, "bidirectional": is_causal is False or None})
        attended = step.attend(module.layer_idx, query, key, value, scaling, softcap, sliding_window)  # type: ignore[arg-type]
        return attended, None
    if softcap is not None:
        _refuse_unknown(module, {"position_bias": position_bias})
        return _attend_capped(query, key, value, attention_mask, scaling, softcap), None
    options: dict[str, Any] = {"is_causal": is_causal, "position_bias": position_bias}
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options, **others)


def _refuse_unknown(module: torch.nn.Module, arguments: dict[str, Any]) -> None:
    unknown = sorted(name for name, value in arguments.items() if value is not None and name not in HARMLESS)
    if unknown:
        raise UnsupportedArguments(
            f"{type(module).__name__} calls attention with {', '.join(unknown)}, unknown to the hf engine: "
            f"{USE_ANOTHER}"
        )


def _attend(  # noqa: PLR0917
    run: Run,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    softcap: float | None,
    window: int | None,
) -> torch.Tensor:
    """query [rows · new, H, D]; key, value [rows, KV, columns, D]. Returns [rows · new, H, D]."""
    rows, new, heads, kv_heads = len(run.rows), run.new, query.shape[1], key.shape[1]
    groups = heads // kv_heads
    by_row = query.reshape(rows, new, heads, -1).transpose(1, 2)
    if run.is_fresh and softcap is None and (window is None or window >= new):
        many = groups > 1
        out = scaled_dot_product_attention(by_row, key, value, is_causal=True, scale=scale, enable_gqa=many)
        return out.transpose(1, 2).reshape(rows * new, heads, -1)
    # Heads that share keys stand as queries of one kv head: nothing is repeated.
    folded = by_row.reshape(rows, kv_heads, groups * new, -1)
    bias = run.bias(window, groups, query.dtype)
    if softcap is None:
        out = scaled_dot_product_attention(folded, key, value, attn_mask=bias, scale=scale)
    else:
        out = _capped(folded, key, value, bias, scale, softcap)
    return out.reshape(rows, heads, new, -1).transpose(1, 2).reshape(rows * new, heads, -1)


def _capped(  # noqa: PLR0917
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float | None,
    softcap: float,
) -> torch.Tensor:
    """softmax(softcap · tanh(scale · q·k / softcap) + bias) · v; Gemma Team 2024, "Gemma 2" (arXiv:2408.00118), 2."""
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value


def _attend_capped(  # noqa: PLR0917
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """Computes `_capped` of query [B, H, Q, D] and key, value [B, KV, K, D]. Returns [B, Q, H, D].

    `mask` [B, 1, Q, K] is boolean, or added to the scores; None: queries are the last Q positions and see what is
    before them.
    """
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
    if mask is None:
        q, k = query.shape[2], key.shape[2]
        mask = torch.ones(q, k, dtype=torch.bool, device=query.device).tril(k - q)
    return _capped(query, key, value, mask, scaling, softcap).transpose(1, 2).contiguous()


AttentionInterface.register(NAME, attend_by_request)
AttentionMaskInterface.register(NAME, sdpa_mask)
