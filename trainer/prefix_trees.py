"""Trees of rows: each token of a beginning that rows share is computed once, forward and backward.

Rows repeat their beginnings: a group its prompt, an episode whose template strips thinking all turns before, a fork or
a sub-agent the context that it continues. In the order of their codes, each row has the longest beginning that it
shares with any row before it in common with the one right before it. So the lengths of these beginnings are the tree:

    rows apart    p p p a a b b · p p p a c · p p p d        one tree    p p p a a b b · c · d
                                                             shared      0             4   3
                                                             fork        −1            3   2      place in the pack

Gradients of all rows meet in what they share. Equal to rows apart but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.trainer.batch import Row

LEAST_SHARE = 0.1
"""Part of a row's tokens that must be shared: with less, the mask that attention to them needs costs what is spared."""
COPIES = 32
"""Shared tokens whose keys and values, copied for a row that continues from them, take the memory of a computed token:
in half precision 4 · width of keys against about 34 · hidden size, with a key for four queries."""


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Rows of which each continues from some token of the one before it."""

    rows: Sequence[Row]
    shared: Sequence[int]
    """Lengths of the beginnings that rows have in common with the row before them. The first is 0."""

    @property
    def cost(self) -> int:
        """Tokens of a pack's budget."""
        return sum(map(_cost, self.rows, self.shared))


def _cost(row: Row, shared: int) -> int:
    return len(row.ids) - shared + shared // COPIES


class Run(NamedTuple):
    """Tokens of `row` from `start` on, which no row before it has."""

    row: Row
    start: int
    fork: int
    """Place in the pack of the token that it continues from; −1: it is a whole row."""


def grow_trees(rows: Sequence[Row], budget: int) -> list[PrefixTree]:
    """All rows, in trees that cost `budget` at most, or as much as the longest row."""
    coded = sorted(((_code(row), row) for row in rows), key=lambda pair: pair[0], reverse=True)
    limit = max([budget, *(len(row.ids) for row in rows)])
    trees: list[tuple[list[Row], list[int]]] = []
    before, cost = _Code(0, b""), 0
    for code, row in coded:
        shared = _common(before, code)
        before = code
        if trees and shared >= LEAST_SHARE * len(row.ids) and cost + _cost(row, shared) <= limit:
            trees[-1][0].append(row)
            trees[-1][1].append(shared)
            cost += _cost(row, shared)
        else:
            trees.append(([row], [0]))
            cost = len(row.ids)
    return [PrefixTree(*tree) for tree in trees]


class _Code(NamedTuple):
    """Tokens of one code are computed alike: the same id, read by the same experts."""

    width: int
    """Bytes of a token; 0: the row shares nothing"""
    tokens: bytes


def _code(row: Row) -> _Code:
    if row.images:
        return _Code(0, b"")
    code = np.ascontiguousarray(row.ids).view(np.uint8).reshape(len(row.ids), -1)
    if row.experts is not None:
        experts = np.ascontiguousarray(row.experts).view(np.uint8)
        code = np.concatenate([code, experts.reshape(len(code), -1)], axis=1)
    return _Code(code.shape[1], code.tobytes())


def _common(one: _Code, other: _Code) -> int:
    """Tokens with which both begin."""
    if one.width != other.width or not one.width:
        return 0
    length = min(len(one.tokens), len(other.tokens))
    differs = np.frombuffer(one.tokens, np.uint8, length) != np.frombuffer(other.tokens, np.uint8, length)
    return (int(differs.argmax()) if differs.any() else length) // one.width


def lay_out(trees: Sequence[PrefixTree]) -> tuple[list[Run], list[NDArray[np.int64]]]:
    """The runs of a pack, and by row where in the pack the tokens before its targets are."""
    runs: list[Run] = []
    predictors: list[NDArray[np.int64]] = []
    tokens = 0
    for tree in trees:
        path = np.zeros(max(len(row.ids) for row in tree.rows), dtype=np.int64)  # places of the tokens of one row
        for row, shared in zip(tree.rows, tree.shared, strict=True):
            own = len(row.ids) - shared
            if own:
                runs.append(Run(row, shared, int(path[shared - 1]) if shared else -1))
                path[shared : len(row.ids)] = np.arange(tokens, tokens + own)
                tokens += own
            predictors.append(path[row.targets - 1])
    return runs, predictors
