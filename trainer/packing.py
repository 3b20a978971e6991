"""Token-budget micro-batches without padding: whole rows end to end, never one row in two packs.

For a model that cannot keep packed rows apart, rows of about one length, which it takes on lines of their own.

Rows may share their beginnings (`prefix_trees`): a run of tokens then continues from a token of another run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.trainer.batch import NO_ID, Row
from penstock.trainer.prefix_trees import PrefixTree, Run, grow_trees, lay_out


class RowLayout(Enum):
    """The layout of rows that a model takes. It determines the cost of a pack, and so which rows are put together."""

    PACKED = "packed"
    """End to end: their tokens."""
    PADDED = "padded"
    """Each on a line as long as the longest: lines · longest."""
    ALONE = "alone"
    """One row is a pack."""


@dataclass(frozen=True, slots=True)
class Pack:
    """One forward and backward. L = tokens, R = runs of tokens that see each other, N = sampled tokens of all rows.

    A run is a row, or where rows share their beginnings: what one of them continues with.
    """

    ids: Tensor
    """[L] int64"""
    positions: Tensor
    """[L] int64, from 0 in every row, shared tokens with it"""
    row_bounds: Tensor
    """[R + 1] int32: run r is tokens row_bounds[r] … row_bounds[r + 1] − 1"""
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
    """[N] int64, from 0: the row of the pack"""
    token: Tensor
    """[N] int64, index among all sampled tokens of the rank's batch"""
    proximal: Tensor | None = None
    """[N] logprobs at the start of the step; None where the training forward's own are those."""
    reference: Tensor | None = None
    """[N] logprobs of the reference policy, if there is one"""
    teacher: Tensor | None = None
    """[N] float32, the teacher's logprobs, NaN for rows without a teacher; None: no row of the pack has one."""
    experts: Tensor | None = None
    """[L, layers, k] int16, which read each token in the engine; k equal numbers: not known. None: of no token."""
    forks: Tensor | None = None
    """[R] int64, the place of the token that a run continues from, of an earlier run; −1: it begins a row. None: no row
    shares anything. On the host."""
    top_ids: Tensor | None = None
    """[N, k] int32, as `Row.top_ids`, `NO_ID` also for rows that have none, or fewer than others. None: no row has."""
    top_logprobs: Tensor | None = None
    """[N, k] float32; 0 for `NO_ID`"""
    image_bytes: Tensor | None = None
    """[bytes] uint8, the encoded images of all runs, each once, end to end. None: no row has images. This and the next
    two stay on the host, where images are decoded."""
    image_bounds: Tensor | None = None
    """[K + 1] int64: image k is bytes image_bounds[k] … image_bounds[k + 1] − 1"""
    shown: Tensor | None = None
    """[M, 2] int64, (run, image) in the order of their places in `ids`"""
    run_lengths: Tensor = None  # type: ignore[assignment]
    """[R] int32, tokens of each run. On the host, since they are read for every layer; None: from `row_bounds`."""
    trained: Tensor = None  # type: ignore[assignment]
    """[T] int64, places among the N of those that are trained on. Their number is known without waiting for a device;
    None: from `mask`."""

    def __post_init__(self) -> None:
        if self.run_lengths is None or self.row_bounds.is_cpu:  # as `row_bounds` are, also of a changed copy
            object.__setattr__(self, "run_lengths", self.row_bounds.diff().cpu())
        if self.trained is None or self.mask.is_cpu:
            object.__setattr__(self, "trained", self.mask.nonzero().flatten())

    @property
    def images(self) -> list[list[bytes]]:
        """The encoded images of each run in the order of their places; empty if no run has any."""
        if self.image_bytes is None or self.image_bounds is None or self.shown is None:
            return []
        bounds, whole = self.image_bounds.tolist(), self.image_bytes.numpy()
        images: list[list[bytes]] = [[] for _ in range(len(self.row_bounds) - 1)]
        encoded = [whole[start:end].tobytes() for start, end in pairwise(bounds)]
        for run, image in self.shown.tolist():
            images[run].append(encoded[image])
        return images

    @property
    def tokens_squared(self) -> int:
        """Σ L² over its rows, less P² for the first P tokens that a row shares: pairs of tokens, each counted twice."""
        return int((2 * self.positions + 1).sum())

    @property
    def without_tops(self) -> Pack:
        """Return the pack without the likeliest ids, whose logprobs are then not computed."""
        return replace(self, top_ids=None, top_logprobs=None)

    def to(self, device: torch.device) -> Pack:
        # These fields go to no device.
        on_host = ("image_bytes", "image_bounds", "shown", "forks", "run_lengths")
        names = [name for name in self.__slots__ if name not in on_host and getattr(self, name) is not None]
        return replace(self, **{name: on_device(getattr(self, name), device) for name in names})


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`. A copy to a GPU is from pinned memory, which torch keeps until it has ended: from
    other memory the host would wait for all that the GPU has to do before it."""
    if device.type == "cuda" and tensor.is_cpu:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


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


def split_by_length(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices by pack: rows of about one length together, so that few tokens are filled up; all but single long rows
    within `budget` tokens, filling included."""
    packs: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        # The first of a pack is its longest.
        if packs and (len(packs[-1]) + 1) * lengths[packs[-1][0]] <= budget:
            packs[-1].append(index)
        else:
            packs.append([index])
    return packs


def pack_rows(
    rows: Sequence[Row], budget: int, *, share: bool = False, layout: RowLayout = RowLayout.PACKED
) -> list[Pack]:
    """Packs of all rows that have a sampled token (the others carry neither loss nor metrics). `share`: their
    beginnings, where rows are packed."""
    rows = [row for row in rows if len(row.targets)]
    if layout is not RowLayout.PACKED:
        lengths = [len(row.ids) for row in rows]
        batches = split_by_length(lengths, budget if layout is RowLayout.PADDED else 0)
        return [join_rows([rows[index] for index in indices]) for indices in batches]
    trees = grow_trees(rows, budget) if share else [PrefixTree([row], [0]) for row in rows]
    chosen = split_by_budget([tree.cost for tree in trees], budget)
    return [join_trees([trees[index] for index in indices]) for indices in chosen]


def join_rows(rows: Sequence[Row]) -> Pack:
    """One pack in which no row shares anything."""
    return join_trees([PrefixTree([row], [0]) for row in rows])


def join_trees(trees: Sequence[PrefixTree]) -> Pack:
    rows = [row for tree in trees for row in tree.rows]
    runs, predictors = lay_out(trees)
    forks = torch.tensor([run.fork for run in runs], dtype=torch.int64)
    top_ids, top_logprobs = _tops(rows)
    image_bytes, image_bounds, shown = _images(runs)
    return Pack(
        ids=_join([run.row.ids[run.start :] for run in runs]),
        positions=_join([np.arange(run.start, len(run.row.ids)) for run in runs]),
        row_bounds=torch.from_numpy(np.cumsum([0, *(len(run.row.ids) - run.start for run in runs)]).astype(np.int32)),
        predictors=_join(predictors),
        targets=_join([row.ids[row.targets] for row in rows]),
        behaviour=_join([row.behaviour for row in rows]),
        staleness=_join([row.staleness for row in rows]),
        mask=_join([row.mask for row in rows]),
        same_version=_join([row.same_version for row in rows]),
        episode=_join([np.full(len(row.targets), row.episode) for row in rows]),
        segment=_join([np.full(len(row.targets), number) for number, row in enumerate(rows)]),
        token=_join([row.first_token + np.arange(len(row.targets)) for row in rows]),
        teacher=_teacher(rows),
        experts=_experts(runs),
        forks=forks if bool((forks >= 0).any()) else None,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        image_bytes=image_bytes,
        image_bounds=image_bounds,
        shown=shown,
    )


def _teacher(rows: Sequence[Row]) -> Tensor | None:
    if all(row.teacher is None for row in rows):
        return None
    unknown = (np.full(len(row.targets), np.nan, dtype=np.float32) for row in rows)
    return _join([none if row.teacher is None else row.teacher for row, none in zip(rows, unknown, strict=True)])


def _tops(rows: Sequence[Row]) -> tuple[Tensor | None, Tensor | None]:
    """Teachers of different data sources may give different numbers of ids."""
    k = max((row.top_ids.shape[1] for row in rows if row.top_ids is not None), default=0)
    if not k:
        return None, None
    ids = [_widened(row.top_ids, len(row.targets), k, np.int32(NO_ID)) for row in rows]
    logprobs = [_widened(row.top_logprobs, len(row.targets), k, np.float32(0.0)) for row in rows]
    return _join(ids), _join(logprobs)


def _widened(values: NDArray[Any] | None, count: int, k: int, fill: np.generic) -> NDArray[Any]:
    """[N, up to k] → [N, k]"""
    whole = np.full((count, k), fill)
    if values is not None:
        whole[:, : values.shape[1]] = values
    return whole


def _experts(runs: Sequence[Run]) -> Tensor | None:
    known = next((run.row.experts for run in runs if run.row.experts is not None), None)
    if known is None:
        return None
    parts = [
        np.zeros((len(run.row.ids) - run.start, *known.shape[1:]), dtype=np.int16)
        if run.row.experts is None
        else run.row.experts[run.start :].astype(np.int16)
        for run in runs
    ]
    return _join(parts)


def _images(runs: Sequence[Run]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return `Pack.image_bytes`, `image_bounds` and `shown`. Rows with images share nothing: each of them is a
    run.
    """
    number: dict[bytes, int] = {}
    shown = [
        (place, number.setdefault(image, len(number))) for place, run in enumerate(runs) for image in run.row.images
    ]
    if not shown:
        return None, None, None
    bounds = np.cumsum([0, *(len(image) for image in number)])
    whole = np.frombuffer(b"".join(number), dtype=np.uint8).copy()
    return torch.from_numpy(whole), torch.from_numpy(bounds.astype(np.int64)), torch.tensor(shown, dtype=torch.int64)


def empty_pack() -> Pack:
    """Return a pack whose gradient is 0: a rank with fewer packs joins the others' collectives with it."""
    nothing = np.zeros(0, dtype=np.int64)
    off = np.zeros(0, dtype=np.bool_)
    return join_rows(
        [Row(0, np.zeros(1, dtype=np.int64), nothing, nothing.astype(np.float32), nothing, off, off, nothing)]
    )


def _join(arrays: Sequence[NDArray]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))
