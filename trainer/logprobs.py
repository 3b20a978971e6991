"""Logprobs and entropies of sampled tokens straight from hidden states: logits exist a tile at a time only.

    z_nv = f(h_n · W_v + b_v) / T          f(x) = c · tanh(s·x / c) under soft-capping, else s·x
    logprob_n = z_n,id − log Σ_v exp z_nv
    entropy_n = log Σ_v exp z_nv − Σ_v p_nv · z_nv
    coarse_nj = z_nj − log Σ_v exp z_nv    j of a few ids S_n that are asked for
    coarse_n,rest = log Σ_v∉S exp z_nv − log Σ_v exp z_nv

Sums over the vocabulary run tile by tile with a running maximum (Milakov and Gimelshein 2018, "Online normalizer
calculation for softmax", arXiv:1805.02867); the backward computes each tile again and turns it into gradients at once
(Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", arXiv:2411.09009, section 4):

    ∂/∂z_nv = g_n · (1[v = id_n] − p_nv) − e_n · p_nv · (log p_nv + entropy_n)      g, e: gradients of logprob, entropy
              + Σ_j c_nj · (1[v = j] − p_nv) + r_n · (1[v ∉ S_n] · p_nv / p_n,rest − p_nv)      c, r: of coarse_n

A head whose rows are shared out over a tensor group is summed over it: no rank ever has all of a token's logits either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

VOCAB_TILE = 4096
CPU_TILE_ELEMENTS = 1 << 20
"""Logits that exist at a time: 4 MiB in float32, about four times, fit a CPU's cache."""
GPU_TILE_ELEMENTS = 1 << 25
"""128 MiB: enough rows in a product to keep a GPU busy."""


WHOLE_ROWS = 512
"""Tokens whose logits are copied at a time, where a model gives all of them at once."""


class Outputs(NamedTuple):
    """The policy's scores of N sampled tokens, float32."""

    logprobs: Tensor
    """[N]"""
    entropy: Tensor | None
    """[N] None if it is not asked for"""
    coarse: Tensor | None = None
    """[N, k + 1] logprobs of k ids in the place of each token, then of all other ids together; −inf where there is no
    such id. None where it is not asked for"""


@dataclass(frozen=True, slots=True)
class Head:
    """The way from the output head's values to logits."""

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
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    head: Head,
    *,
    with_entropy: bool = False,
    ids: Tensor | None = None,
) -> Outputs:
    """hidden [N, H], weight [V, H], targets [N] → float32. `ids` [N, k]: of `Outputs.coarse`, no id twice for a token,
    below 0 for none."""
    if not head.elements:
        head = replace(head, elements=GPU_TILE_ELEMENTS if hidden.is_cuda else CPU_TILE_ELEMENTS)
    coarse_ids = targets.new_zeros(len(targets), 0) if ids is None else ids.long()
    logprobs, entropy, coarse = _TokenLogprobs.apply(hidden, weight, bias, targets, coarse_ids, head, with_entropy)
    return Outputs(logprobs, entropy if with_entropy else None, None if ids is None else coarse)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight, bias, targets, ids, head, with_entropy = inputs
        tiles = _row_tiles(hidden, weight, head)
        tile_sums = [
            _sums(hidden[rows], weight, bias, targets[rows], head, ids=ids[rows], mean=with_entropy) for rows in tiles
        ]
        nothing = hidden.new_zeros(0, dtype=torch.float32)
        none = _Sums(nothing, nothing, nothing, hidden.new_zeros(ids.shape, dtype=torch.float32), nothing)
        sums = _Sums(*(torch.cat(parts) for parts in zip(*(tile_sums or [none]), strict=True)))
        entropy = sums.log_total - sums.mean
        ctx.save_for_backward(hidden, weight, bias, targets, ids, sums.log_total, entropy, sums.log_rest)
        ctx.head, ctx.with_entropy = head, with_entropy
        coarse = torch.cat([sums.some, sums.log_rest[:, None]], 1) - sums.log_total[:, None]
        coarse[:, :-1].masked_fill_(ids < 0, -math.inf)
        return sums.target - sums.log_total, entropy, coarse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, targets, ids, log_total, entropy, log_rest = ctx.saved_tensors
        for_logprobs, for_entropy, for_coarse = gradients
        work = _Backward(hidden, weight, bias, ctx.head, ctx.needs_input_grad)
        for rows in _row_tiles(hidden, weight, ctx.head):
            of_entropy = (for_entropy[rows], entropy[rows]) if ctx.with_entropy else None
            of_coarse = _CoarseGradient.of(ids[rows], for_coarse[rows], log_rest[rows]) if ids.shape[1] else None
            tile = (rows, targets[rows], log_total[rows], for_logprobs[rows])
            work.add(*tile, of_entropy=of_entropy, of_coarse=of_coarse)
        return (*work.result(), None, None, None, None)


class _Sums(NamedTuple):
    """Over the vocabulary, of n tokens."""

    target: Tensor
    """[n] z of the target"""
    log_total: Tensor
    """[n] log Σ exp z"""
    mean: Tensor
    """[n] Σ p·z, if it is asked for"""
    some: Tensor
    """[n, k] z of the ids that are asked for"""
    log_rest: Tensor
    """[n] log Σ exp z over all other ids; −inf if there are none, and if no ids are asked for"""


def _sums(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: Head, *, ids: Tensor, mean: bool
) -> _Sums:
    top = hidden.new_full((len(hidden),), -math.inf, dtype=torch.float32)
    total, weighted, target = (torch.zeros_like(top) for _ in range(3))
    some, rest = hidden.new_zeros(ids.shape, dtype=torch.float32), top
    for columns in _column_tiles(weight):
        z = head.logits(hidden, weight[columns], _of(bias, columns))
        inside, index = _local(targets, columns, head)
        target = torch.where(inside, z.gather(-1, index[:, None]).squeeze(-1), target)
        if ids.shape[1]:
            inside, index = _local(ids, columns, head)
            some = torch.where(inside, z.gather(-1, index), some)
            rest = torch.logaddexp(rest, _without(z, inside, index).logsumexp(-1))
        higher = torch.maximum(top, z.amax(-1))
        shrink = (top - higher).exp()
        share = (z - higher[:, None]).exp_()
        total = total * shrink + share.sum(-1)
        if mean:
            weighted = weighted * shrink + share.mul_(z).sum(-1)
        top = higher
    if head.group is not None:
        own = (top, total, weighted, target)
        top, total, weighted, target, some, rest = _over_group(*own, some=some, rest=rest, group=head.group)
    return _Sums(target, top + total.log(), weighted / total, some, rest)


def _without(z: Tensor, inside: Tensor, index: Tensor) -> Tensor:
    """z [n, v] with −inf in the columns `index` [n, k] that are `inside`; the others name any column, and add 0."""
    return z.scatter_add(-1, index, torch.where(inside, -math.inf, 0.0))


def _over_group(
    top: Tensor,
    total: Tensor,
    weighted: Tensor,
    target: Tensor,
    *,
    some: Tensor,
    rest: Tensor,
    group: dist.ProcessGroup,
) -> tuple[Tensor, ...]:
    """[n] each, and `some` [n, k], over all parts of the vocabulary."""
    highest = torch.stack([top, rest])
    dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    shrink = (top - highest[0]).exp()
    of_rest = torch.where(highest[1].isinf(), 0.0, (rest - highest[1]).exp())
    summed = torch.cat([torch.stack([total * shrink, weighted * shrink, target, of_rest]), some.t()])
    dist.all_reduce(summed, dist.ReduceOp.SUM, group)
    return highest[0], summed[0], summed[1], summed[2], summed[4:].t(), highest[1] + summed[3].log()


class _CoarseGradient(NamedTuple):
    """Gradients of n tokens' coarse logprobs; 0 without such an id, or no other ones."""

    ids: Tensor
    """[n, k]"""
    of_some: Tensor
    """[n, k]"""
    of_rest: Tensor
    """[n]"""
    log_rest: Tensor
    """[n] as in `_Sums`, 0 in place of −inf"""

    @classmethod
    def of(cls, ids: Tensor, gradient: Tensor, log_rest: Tensor) -> _CoarseGradient:
        empty = log_rest.isinf()
        of_some = gradient[:, :-1].masked_fill(ids < 0, 0.0)
        return cls(ids, of_some, gradient[:, -1].masked_fill(empty, 0.0), log_rest.masked_fill(empty, 0.0))

    def total(self) -> Tensor:
        """[n]"""
        return self.of_some.sum(-1) + self.of_rest

    def add_to(self, change: Tensor, z: Tensor, columns: slice, head: Head) -> None:
        """Add the gradient of the z [n, v] of one tile, without the share −p · total."""
        inside, index = _local(self.ids, columns, head)
        change.scatter_add_(-1, index, torch.where(inside, self.of_some, 0.0))
        others = (_without(z, inside, index) - self.log_rest[:, None]).exp_()
        change.addcmul_(others, self.of_rest[:, None])


class _Backward:
    """Gradients, added up tile by tile. Those of half-precision weights are added up in float32."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, needs_grad: tuple[bool, ...]
    ) -> None:
        self._hidden, self._weight, self._bias, self._head = hidden, weight, bias, head
        self._for_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_grad[0] else None
        self._for_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_grad[1] else None
        self._for_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs_grad[2] else None

    def add(
        self,
        rows: slice,
        targets: Tensor,
        log_sum: Tensor,
        for_logprobs: Tensor,
        *,
        of_entropy: tuple[Tensor, Tensor] | None,
        of_coarse: _CoarseGradient | None,
    ) -> None:
        """Gradients: `for_logprobs` [n] of logprobs, `of_entropy` ([n], [n]) of entropies, with the entropies."""
        hidden = self._hidden[rows]
        everywhere = for_logprobs if of_coarse is None else for_logprobs + of_coarse.total()
        for columns in _column_tiles(self._weight):
            z = self._head.logits(hidden, self._weight[columns], _of(self._bias, columns))
            factor = -everywhere[:, None]
            if of_entropy is not None:
                gradient, entropy = of_entropy
                factor = factor - gradient[:, None] * (z - (log_sum - entropy)[:, None])
            change = (z - log_sum[:, None]).exp_().mul_(factor)
            inside, index = _local(targets, columns, self._head)
            change.scatter_add_(-1, index[:, None], torch.where(inside, for_logprobs, 0.0)[:, None])
            if of_coarse is not None:
                of_coarse.add_to(change, z, columns, self._head)
            self._spread(rows, columns, hidden, self._head.slope_(change, z))

    def result(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if self._for_hidden is not None and self._head.group is not None:
            dist.all_reduce(self._for_hidden, dist.ReduceOp.SUM, self._head.group)
        sums = (self._for_hidden, self._for_weight, self._for_bias)
        inputs = (self._hidden, self._weight, self._bias)
        hidden, weight, bias = (
            None if total is None or like is None else total.to(like.dtype)
            for total, like in zip(sums, inputs, strict=True)
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
    """([n] or [n, k] whether a target is in the tile, the same of its column there, any column for the others)"""
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


def coarse_logprobs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """logits [N, V], ids [N, k] as of `token_logprobs` → [N, k + 1] as `Outputs.coarse`. Copies of logits exist for
    `WHOLE_ROWS` tokens at a time, in the backward too."""

    def of_rows(some: Tensor, row_ids: Tensor) -> Tensor:
        return checkpoint(_coarse_of, some, row_ids, temperature, use_reentrant=False, preserve_rng_state=False)

    parts = zip(logits.split(WHOLE_ROWS), ids.long().split(WHOLE_ROWS), strict=True)
    return torch.cat([of_rows(some, some_ids) for some, some_ids in parts])


def _coarse_of(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    z, known = logits.float() / temperature, ids >= 0
    index = ids.clamp(min=0)
    others = _without(z, known, index)
    empty = others.amax(-1, keepdim=True) == -math.inf  # where a sum over nothing would have NaN for its gradient
    rest = others.masked_fill(empty, 0.0).logsumexp(-1, keepdim=True)
    logs = torch.cat([z.gather(-1, index), rest], 1) - z.logsumexp(-1, keepdim=True)
    return logs.masked_fill(torch.cat([~known, empty], 1), -math.inf)
