"""A pack as megatron's GPTModel takes it, and where in its hidden states the sampled tokens are predicted.

Two layouts:

    rectangle   every row on its own line, filled up on the right to the longest, and that to a multiple of
                `align`                                                                      any layers
    packed      rows end to end, each filled up to a multiple of `align`; with C context ranks each row is cut into
                2C equal pieces, of which rank c has pieces c and 2C − 1 − c, so that under causal attention all ranks
                have the same work (megatron-core's order)                                  Transformer Engine

What fills up comes after its row's tokens, and attention looks back only: no token of a row sees it. Sizes are read
from the rows' lengths on the host: from tensors the host would wait for all that the device has to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.trainer.packing import Pack, on_device


@dataclass(frozen=True, slots=True)
class Inputs:
    """M of the pack's N sampled tokens are predicted on this rank, which has K of its L tokens."""

    arguments: dict[str, Any]
    """Arguments of `GPTModel.forward`."""
    own: Tensor
    """[M] which of the pack's sampled tokens"""
    line: Tensor
    """[M] second index of the hidden states [S, B, H] that predict them"""
    column: Tensor
    """[M] first index"""
    tokens: Tensor
    """[K] which of the pack's tokens"""
    place: Tensor
    """[K] where each is among the S · B places of the hidden states, filling included: column · B + line"""
    size: int
    """S · B"""


@dataclass(frozen=True, slots=True)
class ContextShare:
    """A packed layout over context ranks, seen from one of them. L = tokens of the pack."""

    bounds: Tensor
    """[R + 1] int32, rows with what fills them up, in the whole pack"""
    mine: Tensor
    """[L] bool, this rank has the token"""
    place: Tensor
    """[L] where among this rank's tokens; meaningless if it is not `mine`"""
    length: int
    """Tokens of this rank, filling included"""
    longest: int
    """Tokens of the longest row, with what fills it up"""


def rectangle(pack: Pack, align: int) -> Inputs:
    lengths, device = pack.run_lengths.long(), pack.ids.device
    rows, longest = len(lengths), -(-int(lengths.max()) // align) * align
    line = on_device(_lines(lengths), device)
    ids = torch.zeros(rows, longest, dtype=torch.long, device=device)
    ids[line, pack.positions] = pack.ids
    columns = torch.arange(longest, device=device)
    arguments = {
        "input_ids": ids,
        "position_ids": columns.expand(rows, -1),
        # True is hidden.
        "attention_mask": (columns[:, None] < columns)[None, None],
    }
    own, tokens = (torch.arange(count, device=device) for count in (len(pack.targets), len(pack.ids)))
    place = pack.positions * rows + line
    return Inputs(arguments, own, line[pack.predictors], pack.positions[pack.predictors], tokens, place, rows * longest)


def packed(pack: Pack, align: int, contexts: int, context: int) -> Inputs:
    """Return the inputs on context rank `context` of `contexts`; `align` is a multiple of 2 · contexts if there are
    several.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    cut = cut_rows(pack, align, contexts, context)
    ids, positions = (torch.zeros(cut.length, dtype=torch.long, device=pack.ids.device) for _ in range(2))
    tokens = _places(cut.mine, contexts)
    place = cut.place[tokens]
    ids[place] = pack.ids[tokens]
    positions[place] = pack.positions[tokens]
    bounds = {
        name: cut.bounds for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    }
    sizes = {"max_seqlen_q": cut.longest, "max_seqlen_kv": cut.longest}
    arguments = {
        "input_ids": ids[None],
        "position_ids": positions[None],
        "attention_mask": None,
        "packed_seq_params": PackedSeqParams(qkv_format="thd", **bounds, **sizes),
    }
    own = _places(cut.mine[pack.predictors], contexts)
    return Inputs(arguments, own, torch.zeros_like(own), cut.place[pack.predictors[own]], tokens, place, cut.length)


def cut_rows(pack: Pack, align: int, contexts: int, context: int) -> ContextShare:
    """See `packed`."""
    lengths, device = pack.run_lengths.long(), pack.ids.device
    filled = (lengths + align - 1) // align * align
    bounds, line = torch.cat([filled.new_zeros(1), filled.cumsum(0)]), _lines(lengths)
    sizes = {"length": int(bounds[-1]) // contexts, "longest": int(filled.max())}
    begin, bounds = on_device(bounds[line], device), on_device(bounds.int(), device)
    if contexts == 1:
        mine = torch.ones_like(pack.ids, dtype=torch.bool)
        return ContextShare(bounds, mine, begin + pack.positions, **sizes)
    piece_length = on_device((filled // (2 * contexts))[line], device)
    piece, offset = pack.positions // piece_length, pack.positions % piece_length
    first, second = piece == context, piece == 2 * contexts - 1 - context
    place = begin // contexts + torch.where(second, piece_length, 0) + offset
    return ContextShare(bounds, first | second, place, **sizes)


def _lines(lengths: Tensor) -> Tensor:
    """lengths [R] → [L] the row of each token"""
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths)


def _places(mine: Tensor, contexts: int) -> Tensor:
    """Places where `mine` is true: all of them on the only context rank."""
    return torch.arange(len(mine), device=mine.device) if contexts == 1 else mine.nonzero().flatten()
