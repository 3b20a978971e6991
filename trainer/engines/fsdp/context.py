"""Context parallelism: the tokens of one pack are shared out over ranks, for rows too long for one of them.

    rank c has tokens c·L/C … (c + 1)·L/C of the pack, whatever row they are of; positions and bounds go with them

Attention alone looks beyond a rank's tokens, and layers with a state, which read the whole pack on every rank
(`mixers`). Before attention an all-to-all turns "all heads of my tokens" into "all tokens of my heads", so that the
attention over whole rows runs unchanged, and after it another turns that back (Jacobs et al. 2023, "DeepSpeed Ulysses",
arXiv:2309.14509). What a rank says of its sampled tokens is joined: every rank of the group continues with all N values
and the same loss, and its backward takes its own tokens' gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from penstock.trainer.packing import Pack


@dataclass(frozen=True, slots=True)
class PackPart:
    """The part of a pack that one rank computes. l = its tokens, n = its sampled tokens."""

    ids: Tensor
    """[l]"""
    positions: Tensor
    """[l]"""
    row_bounds: Tensor
    """[R + 1], or one more where the pack was filled up: of the whole pack"""
    predictors: Tensor
    """[n] places among the rank's tokens"""
    targets: Tensor
    """[n]"""
    run_lengths: Tensor
    """[R] between `row_bounds`, on the host"""
    counts: tuple[int, ...] = ()
    """n of every rank of the group"""
    order: Tensor | None = None
    """[N] places in the pack of the sampled tokens of all ranks, as they are joined; None: one rank"""
    forks: Tensor | None = None
    """[R] as `Pack.forks`"""
    experts: Tensor | None = None
    """[l, layers, k] as `Pack.experts`"""
    top_ids: Tensor | None = None
    """[n, k] as `Pack.top_ids`"""
    images: Sequence[Sequence[bytes]] = ()
    """Same as `Pack.images`; empty over several ranks."""


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The ranks that share a pack's tokens, and this one's place among them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def part(self, pack: Pack) -> PackPart:
        """This rank's, by itself: every rank has the whole pack."""
        length = -(-len(pack.ids) // self.size)
        ids, positions, bounds, run_lengths = _filled(pack, length * self.size)
        start = self.rank * length
        edges = torch.arange(self.size + 1, device=pack.predictors.device) * length
        predictors, order = pack.predictors.sort(stable=True)  # a shared token predicts for several rows
        cuts = torch.searchsorted(predictors, edges).tolist()
        mine = order[cuts[self.rank] : cuts[self.rank + 1]]
        counts = tuple(end - begin for begin, end in pairwise(cuts))
        own = slice(start, start + length)
        experts = pack.experts
        if experts is not None:
            experts = torch.cat([experts, experts.new_zeros(len(ids) - len(experts), *experts.shape[1:])])[own]
        forks = pack.forks
        if forks is not None:  # the run that fills the pack up begins a row
            forks = torch.nn.functional.pad(forks, (0, len(run_lengths) - len(forks)), value=-1)
        return PackPart(
            ids[own],
            positions[own],
            bounds,
            pack.predictors[mine] - start,
            pack.targets[mine],
            run_lengths,
            counts,
            order,
            forks=forks,
            experts=experts,
            top_ids=None if pack.top_ids is None else pack.top_ids[mine],
        )

    def join(self, values: Tensor, part: PackPart) -> Tensor:
        """[n, …] of every rank → [N, …] on every rank. Each rank's loss must be the same function of the result."""
        joined: Tensor = _Join.apply(values, part.counts, self)
        return joined if part.order is None else torch.empty_like(joined).index_copy(0, part.order, joined)

    def to_heads(self, x: Tensor) -> Tensor:
        """[1, H, l, D] of this rank's tokens → [1, H / C, L, D] of its heads."""
        heads, length, width = x.shape[1:]
        received = Exchange.apply(x.reshape(self.size, heads // self.size, length, width), self.group)
        return received.transpose(0, 1).reshape(1, heads // self.size, self.size * length, width)

    def to_tokens(self, x: Tensor) -> Tensor:
        """[1, H / C, L, D] of this rank's heads → [1, H, l, D] of its tokens."""
        heads, length, width = x.shape[1], x.shape[2] // self.size, x.shape[3]
        received = Exchange.apply(x.reshape(heads, self.size, length, width).transpose(0, 1), self.group)
        return received.reshape(1, self.size * heads, length, width)

    def gather(self, x: Tensor) -> Tensor:
        """[1, l, H] of this rank's tokens → [1, L, H] of all ranks'. Its backward adds up what all ranks make of
        them."""
        return Exchange.apply(x.expand(self.size, -1, -1), self.group).reshape(1, -1, x.shape[2])

    def own(self, x: Tensor) -> Tensor:
        """[1, L, H] → [1, l, H], this rank's tokens."""
        return x.chunk(self.size, dim=1)[self.rank]


def whole_part(pack: Pack) -> PackPart:
    """Return the part of a pack that one rank computes alone."""
    return PackPart(
        pack.ids,
        pack.positions,
        pack.row_bounds,
        pack.predictors,
        pack.targets,
        pack.run_lengths,
        forks=pack.forks,
        experts=pack.experts,
        top_ids=pack.top_ids,
        images=pack.images,
    )


def _filled(pack: Pack, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, positions, bounds and lengths of runs with one more row of zeros up to `length` tokens."""
    missing = length - len(pack.ids)
    if not missing:
        return pack.ids, pack.positions, pack.row_bounds, pack.run_lengths
    ids = torch.nn.functional.pad(pack.ids, (0, missing))
    positions = torch.cat([pack.positions, torch.arange(missing, device=pack.positions.device)])
    bounds = torch.cat([pack.row_bounds, pack.row_bounds.new_tensor([length])])
    return ids, positions, bounds, torch.cat([pack.run_lengths, pack.run_lengths.new_tensor([missing])])


class Exchange(torch.autograd.Function):
    """[C, …]: piece c goes to rank c, and the pieces that come stand in the order of their ranks. Its own inverse.

    With sizes: of rows [S, …] the next `there[c]` go to rank c, and `here[c]` come from it.

    Contiguous copies both ways: a gradient with permuted strides, as attention's is, would be sent in the wrong order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        pieces: Tensor,
        group: dist.ProcessGroup,
        there: list[int] | None = None,
        here: list[int] | None = None,
    ) -> Tensor:
        ctx.group, ctx.there, ctx.here = group, there, here
        return _exchanged(pieces, group, there, here)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradients[0], ctx.group, ctx.here, ctx.there), None, None, None


def _exchanged(pieces: Tensor, group: dist.ProcessGroup, there: list[int] | None, here: list[int] | None) -> Tensor:
    sent = pieces.contiguous()
    received = sent.new_empty(len(sent) if here is None else sum(here), *sent.shape[1:])
    dist.all_to_all_single(received, sent, here, there, group=group)
    return received


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, counts: tuple[int, ...], context: ContextGroup) -> Tensor:
        start = sum(counts[: context.rank])
        ctx.own = slice(start, start + counts[context.rank])
        padded = values.new_zeros(max(counts), *values.shape[1:])
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in counts]
        if max(counts):
            dist.all_gather(parts, padded, group=context.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # Every rank has the whole gradient, from the same loss: no sum over the group.
        return gradients[0][ctx.own].contiguous(), None, None
