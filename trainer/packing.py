"""Token-budget micro-batches without padding: whole rows end to end, never one row in two packs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.trainer.batch import Row


@dataclass(frozen=True, slots=True)
class Pack:
    """One forward and backward. L = tokens of all rows, R = rows, N = sampled tokens of all rows."""

    ids: Tensor
    """[L] int64"""
    positions: Tensor
    """[L] int64, from 0 in every row"""
    row_bounds: Tensor
    """[R + 1] int32: row r is tokens row_bounds[r] … row_bounds[r + 1] − 1"""
    predictors: Tensor
    """[N] where in the pack the model predicts a sampled token: the position before it"""
    targets: Tensor
    """[N] int64, the sampled ids"""
    behaviour: Tensor
    """[N] float32, the engine's logprobs"""
    staleness: Tensor
    """[N] int64"""
    mask: Tensor
    """[N] bool, trained on"""
    same_version: Tensor
    """[N] bool, see `Row`"""
    episode: Tensor
    """[N] int64, index into the batch's episodes"""
    segment: Tensor
    """[N] int64, 0 … R − 1: the row of the pack"""
    token: Tensor
    """[N] int64, index among all sampled tokens of the rank's batch"""
    proximal: Tensor | None = None
    """[N] logprobs at the start of the step; None where the training forward's own are those."""
    reference: Tensor | None = None
    """[N] logprobs of the reference policy, where there is one"""

    def to(self, device: torch.device) -> Pack:
        present = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}
        return replace(self, **{name: tensor.to(device) for name, tensor in present.items()})


def split_by_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices by pack, first fit of falling length: few packs, all but single long rows within `budget` tokens."""
    packs: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for number, free in enumerate(room):
            if lengths[index] <= free:
                packs[number].append(index)
                room[number] -= lengths[index]
                break
        else:
            packs.append([index])
            room.append(budget - lengths[index])
    return packs


def pack_rows(rows: Sequence[Row], budget: int) -> list[Pack]:
    """Packs of all rows that have a sampled token (the others carry neither loss nor metrics)."""
    rows = [row for row in rows if len(row.targets)]
    chosen = split_by_budget([len(row.ids) for row in rows], budget)
    return [join_rows([rows[index] for index in indices]) for indices in chosen]


def join_rows(rows: Sequence[Row]) -> Pack:
    bounds = np.cumsum([0, *(len(row.ids) for row in rows)])
    starts = bounds[:-1]
    return Pack(
        ids=_join([row.ids for row in rows]),
        positions=_join([np.arange(len(row.ids)) for row in rows]),
        row_bounds=torch.from_numpy(bounds.astype(np.int32)),
        predictors=_join([row.targets - 1 + start for row, start in zip(rows, starts, strict=True)]),
        targets=_join([row.ids[row.targets] for row in rows]),
        behaviour=_join([row.behaviour for row in rows]),
        staleness=_join([row.staleness for row in rows]),
        mask=_join([row.mask for row in rows]),
        same_version=_join([row.same_version for row in rows]),
        episode=_join([np.full(len(row.targets), row.episode) for row in rows]),
        segment=_join([np.full(len(row.targets), number) for number, row in enumerate(rows)]),
        token=_join([row.first_token + np.arange(len(row.targets)) for row in rows]),
    )


def empty_pack() -> Pack:
    """A forward and backward that changes nothing: ranks with less work keep step with the others' collectives."""
    nothing = np.zeros(0, dtype=np.int64)
    off = np.zeros(0, dtype=np.bool_)
    return join_rows(
        [Row(0, np.zeros(1, dtype=np.int64), nothing, nothing.astype(np.float32), nothing, off, off, nothing)]
    )


def _join(arrays: Sequence[NDArray]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))
