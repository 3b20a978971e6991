"""Logprobs and entropies of sampled tokens straight from hidden states: logits exist a tile at a time only.

    z_nv = f(h_n · W_v + b_v) / T          f(x) = c · tanh(s·x / c) under soft-capping, else s·x
    logprob_n = z_n,id − log Σ_v exp z_nv
    entropy_n = log Σ_v exp z_nv − Σ_v p_nv · z_nv

Sums over the vocabulary run tile by tile with a running maximum (Milakov and Gimelshein 2018, "Online normalizer
calculation for softmax", arXiv:1805.02867); the backward computes each tile again and turns it into gradients at once
(Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", arXiv:2411.09009, section 4):

    ∂/∂z_nv = g_n · (1[v = id_n] − p_nv) − e_n · p_nv · (log p_nv + entropy_n)      g, e: gradients of logprob, entropy

A head whose rows are shared out over a tensor group is summed over it: no rank ever has all of a token's logits either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

VOCAB_TILE = 4096
CPU_TILE_ELEMENTS = 1 << 20
"""Logits that exist at a time: 4 MiB in float32, about four times, fit a CPU's cache."""
GPU_TILE_ELEMENTS = 1 << 25
"""128 MiB: enough rows in a product to keep a GPU busy."""


@dataclass(frozen=True, slots=True)
class Head:
    """How logits come from what the output head says."""

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None
    first: int = 0
    """Token id of the head's first row: not 0 where another rank has rows before it."""
    group: dist.ProcessGroup | None = None
    """The ranks that share the head's rows; None: this one has all."""
    elements: int = 0
    """Logits that exist at a time; 0: as suits the device."""

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """hidden [n, H], weight [v, H], bias [v] → z [n, v], float32"""
        raw = torch.nn.functional.linear(hidden, weight, bias).float()
        if self.scale != 1.0:
            raw.mul_(self.scale)
        if self.softcap is not None:
            raw.div_(self.softcap).tanh_().mul_(self.softcap)
        return raw if self.temperature == 1.0 else raw.div_(self.temperature)

    def slope_(self, gradient: Tensor, z: Tensor) -> Tensor:
        """∂L/∂z → ∂L/∂(h·W + b), in place; `z` is used up."""
        if self.scale != self.temperature:
            gradient.mul_(self.scale / self.temperature)
        if self.softcap is not None:
            gradient.mul_(z.mul_(self.temperature / self.softcap).square_().neg_().add_(1))
        return gradient


def token_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: Head, *, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """hidden [N, H], weight [V, H], targets [N] → (logprobs [N], entropies [N] or None), float32."""
    if not head.elements:
        head = replace(head, elements=GPU_TILE_ELEMENTS if hidden.is_cuda else CPU_TILE_ELEMENTS)
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, bias, targets, head, with_entropy)
    return logprobs, entropy if with_entropy else None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        hidden, weight, bias, targets, head, with_entropy = given
        tiles = _row_tiles(hidden, weight, head)
        found = [_sums(hidden[rows], weight, bias, targets[rows], head, mean=with_entropy) for rows in tiles]
        nothing = hidden.new_zeros(0, dtype=torch.float32)
        target, log_sum, mean = (torch.cat(parts) for parts in zip(*(found or [(nothing,) * 3]), strict=True))
        entropy = log_sum - mean
        ctx.save_for_backward(hidden, weight, bias, targets, log_sum, entropy)
        ctx.head, ctx.with_entropy = head, with_entropy
        return target - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, targets, log_sum, entropy = ctx.saved_tensors
        for_logprobs, for_entropy = gradients
        work = _Backward(hidden, weight, bias, ctx.head, ctx.needs_input_grad)
        for rows in _row_tiles(hidden, weight, ctx.head):
            of_entropy = (for_entropy[rows], entropy[rows]) if ctx.with_entropy else None
            work.add(rows, targets[rows], log_sum[rows], for_logprobs[rows], of_entropy)
        return (*work.result(), None, None, None)


def _sums(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: Head, *, mean: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """[n] each: z of the target, log Σ exp z, and Σ p·z where `mean` asks for it."""
    top = hidden.new_full((len(hidden),), -math.inf, dtype=torch.float32)
    total, weighted, target = (torch.zeros_like(top) for _ in range(3))
    for columns in _column_tiles(weight):
        z = head.logits(hidden, weight[columns], _of(bias, columns))
        inside, index = _local(targets, columns, head)
        target = torch.where(inside, z.gather(-1, index[:, None]).squeeze(-1), target)
        higher = torch.maximum(top, z.amax(-1))
        shrink = (top - higher).exp()
        share = (z - higher[:, None]).exp_()
        total = total * shrink + share.sum(-1)
        if mean:
            weighted = weighted * shrink + share.mul_(z).sum(-1)
        top = higher
    if head.group is not None:
        top, total, weighted, target = _over_group(top, total, weighted, target, head.group)
    return target, top + total.log(), weighted / total


def _over_group(
    top: Tensor, total: Tensor, weighted: Tensor, target: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    highest = top.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    shrink = (top - highest).exp()
    summed = torch.stack([total * shrink, weighted * shrink, target])
    dist.all_reduce(summed, dist.ReduceOp.SUM, group)
    return highest, summed[0], summed[1], summed[2]


class _Backward:
    """Gradients, added up tile by tile. Those of half-precision weights are added up in float32."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, wanted: tuple[bool, ...]
    ) -> None:
        self._hidden, self._weight, self._bias, self._head = hidden, weight, bias, head
        self._for_hidden = torch.zeros_like(hidden, dtype=torch.float32) if wanted[0] else None
        self._for_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        self._for_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wanted[2] else None

    def add(
        self, rows: slice, targets: Tensor, log_sum: Tensor, given: Tensor, of_entropy: tuple[Tensor, Tensor] | None
    ) -> None:
        """`given` [n] and `of_entropy` ([n], [n]): gradients of the logprobs; of the entropies, and those."""
        hidden = self._hidden[rows]
        for columns in _column_tiles(self._weight):
            z = self._head.logits(hidden, self._weight[columns], _of(self._bias, columns))
            factor = -given[:, None]
            if of_entropy is not None:
                gradient, entropy = of_entropy
                factor = factor - gradient[:, None] * (z - (log_sum - entropy)[:, None])
            change = (z - log_sum[:, None]).exp_().mul_(factor)
            inside, index = _local(targets, columns, self._head)
            change.scatter_add_(-1, index[:, None], torch.where(inside, given, 0.0)[:, None])
            self._spread(rows, columns, hidden, self._head.slope_(change, z))

    def result(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if self._for_hidden is not None and self._head.group is not None:
            dist.all_reduce(self._for_hidden, dist.ReduceOp.SUM, self._head.group)
        sums = (self._for_hidden, self._for_weight, self._for_bias)
        given = (self._hidden, self._weight, self._bias)
        hidden, weight, bias = (
            None if total is None or like is None else total.to(like.dtype)
            for total, like in zip(sums, given, strict=True)
        )
        return hidden, weight, bias

    def _spread(self, rows: slice, columns: slice, hidden: Tensor, change: Tensor) -> None:
        """∂L/∂(h·W + b) of one tile into the three sums."""
        rounded = change.to(hidden.dtype)
        if self._for_hidden is not None:
            _add_product(self._for_hidden[rows], rounded, self._weight[columns])
        if self._for_weight is not None:
            _add_product(self._for_weight[columns], rounded.t(), hidden)
        if self._for_bias is not None:
            self._for_bias[columns] += change.sum(0)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _row_tiles(hidden: Tensor, weight: Tensor, head: Head) -> Iterator[slice]:
    size = max(1, head.elements // min(VOCAB_TILE, len(weight)))
    yield from (slice(start, start + size) for start in range(0, len(hidden), size))


def _column_tiles(weight: Tensor) -> Iterator[slice]:
    yield from (slice(start, min(start + VOCAB_TILE, len(weight))) for start in range(0, len(weight), VOCAB_TILE))


def _of(bias: Tensor | None, columns: slice) -> Tensor | None:
    return None if bias is None else bias[columns]


def _local(targets: Tensor, columns: slice, head: Head) -> tuple[Tensor, Tensor]:
    """([n] whether a target is in the tile, [n] its column there, any column for the others)"""
    index = targets - head.first - columns.start
    inside = (index >= 0) & (index < columns.stop - columns.start)
    return inside, torch.where(inside, index, 0)


def target_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """logits [N, V], targets [N] → logprobs [N], float32."""
    scaled = logits.float() / temperature
    return scaled.gather(-1, targets[:, None]).squeeze(-1) - scaled.logsumexp(-1)


def entropies(logits: Tensor, temperature: float) -> Tensor:
    """logits [N, V] → [N], float32: logsumexp(z) − Σ p · z"""
    scaled = logits.float() / temperature
    return scaled.logsumexp(-1) - (scaled.softmax(-1) * scaled).sum(-1)
