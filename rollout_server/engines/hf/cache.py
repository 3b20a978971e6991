"""Keys and values of the hf engine, in rows of equal capacity, and the prefixes that were computed before.

    Bucket    rows [rows, capacity, KV, D] per plane: attention reads them as one padded batch, without a copy
    Prefix    the keys and values of a whole context, kept until room is needed; a row that begins alike copies them

A plane is the keys or the values of one layer. A row moves to the next bucket when it outgrows its own. Buckets and
prefixes together hold at most `limit` tokens; the oldest prefixes go first.

Everything here belongs to the decoding thread, or to the one that swaps weights while decoding is paused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray

from penstock.rollout_server.engines.hf.sampling import ActiveRequest

PAGE_TOKENS = 16
"""Prefixes are found by whole pages, and then used to their last common token."""
Planes = list[torch.Tensor]
"""One tensor [planes, …, KV, D] per shape (KV, D): of most models one, with 2 · layers planes."""


@dataclass(slots=True, kw_only=True)
class Row(ActiveRequest):
    """A request, and where its keys and values are."""

    ids: list[int]
    """Context of the row: the prompt and the sampled ids."""
    fed: int = 0
    """Number of ids that have keys and values."""
    new: int = 0
    """Number of ids that are computed in the current pass."""
    cancelled: bool = False
    epoch: int = -1
    """Weight epoch of its keys and values. Rows of an older epoch are never shared."""
    reused: int = 0
    """Tokens copied from a prefix."""
    adapter: str | None = None
    """Name of the adapter that computes its keys and values."""
    bucket: Bucket | None = None
    index: int = -1
    experts: NDArray[Any] | None = None
    """[tokens at most, layers, k] that read those of `fed`, of the passes whose keys and values it holds."""

    @property
    def left(self) -> int:
        """Tokens to be computed; the last of them gives the next token."""
        return len(self.ids) - self.fed


class Layout:
    """Which plane holds what: `keys[layer]` and `values[layer]` are (tensor, plane)."""

    def __init__(self, shapes: dict[int, tuple[torch.Size, torch.Size]], dtype: torch.dtype) -> None:
        """`shapes`: layer → shape of its keys and of its values, each [1, KV, Q, D]."""
        self.dtype = dtype
        self.kinds: list[tuple[int, int]] = []
        """(KV, D) of each tensor."""
        self.counts: list[int] = []
        """Planes of each tensor."""
        self.keys = {layer: self._add(pair[0]) for layer, pair in shapes.items()}
        self.values = {layer: self._add(pair[1]) for layer, pair in shapes.items()}

    def _add(self, shape: torch.Size) -> tuple[int, int]:
        kind = (shape[1], shape[3])
        if kind not in self.kinds:
            self.kinds.append(kind)
            self.counts.append(0)
        tensor = self.kinds.index(kind)
        self.counts[tensor] += 1
        return tensor, self.counts[tensor] - 1

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all planes."""
        sizes = zip(self.counts, self.kinds, strict=True)
        return sum(count * heads * width for count, (heads, width) in sizes) * self.dtype.itemsize

    def zeros(self, rows: int, capacity: int) -> Planes:
        """Zeros: what is masked must be a number all the same."""
        pairs = zip(self.counts, self.kinds, strict=True)
        return [torch.zeros(count, rows, capacity, *kind, dtype=self.dtype) for count, kind in pairs]


class Bucket:
    """Rows of one capacity; those in use come first, without a gap."""

    def __init__(self, layout: Layout, capacity: int) -> None:
        self.layout, self.capacity = layout, capacity
        self.rows: list[Row] = []
        self.planes = layout.zeros(0, capacity)

    @property
    def allocated(self) -> int:
        return self.planes[0].shape[1]

    def resize(self, rows: int) -> None:
        """Room for this many rows, at least those in use."""
        planes, used = self.layout.zeros(rows, self.capacity), len(self.rows)
        for new, old in zip(planes, self.planes, strict=True):
            new[:, :used] = old[:, :used]
        self.planes = planes

    def append(self, row: Row, planes: Planes) -> None:
        """`planes` [planes, row.fed, KV, D] become the row's."""
        row.bucket, row.index = self, len(self.rows)
        self.rows.append(row)
        if row.fed:
            for plane, source in zip(self.planes, planes, strict=True):
                plane[:, row.index, : row.fed] = source[:, : row.fed]

    def copy_of(self, row: Row) -> Planes:
        return [plane[:, row.index, : row.fed].clone() for plane in self.planes]

    def remove(self, row: Row) -> None:
        """The last row takes its place. What a row leaves behind is cleared: it may hold NaN, which no mask hides."""
        last = self.rows.pop()
        for plane in self.planes:
            if last is not row:
                plane[:, row.index] = plane[:, last.index]
            plane[:, last.index] = 0
        if last is not row:
            self.rows[row.index] = last
            last.index = row.index
        row.bucket, row.index = None, -1


@dataclass(slots=True, eq=False)
class Prefix:
    """A context and its keys and values, of the weights of now."""

    ids: list[int]
    planes: Planes
    adapter: str | None = None
    experts: NDArray[Any] | None = None
    """[tokens, layers, k] of the passes that made them."""
    pages: set[int] = field(default_factory=set)
    """Names of the pages under which it is found."""


class KVCache:
    """Buckets and prefixes within one limit."""

    def __init__(self, layout: Layout, limit: int, longest: int) -> None:
        """`limit`: tokens held at most; `longest`: of one request."""
        self.layout, self.limit = layout, limit
        self.largest_row = -(-longest // PAGE_TOKENS) * PAGE_TOKENS
        self.epoch = 0
        self.reused_tokens = 0
        self._buckets: dict[int, Bucket] = {}
        self._prefixes: OrderedDict[int, Prefix] = OrderedDict()
        self._by_page: dict[int, Prefix] = {}
        self._prefix_tokens = 0

    @property
    def buckets(self) -> Iterator[Bucket]:
        """Yield the buckets with rows in use."""
        return (bucket for bucket in self._buckets.values() if bucket.rows)

    @property
    def pages_in_use(self) -> int:
        """Pages of rows; prefixes do not count."""
        return sum(-(-row.fed // PAGE_TOKENS) for bucket in list(self._buckets.values()) for row in list(bucket.rows))

    @property
    def held_bytes(self) -> int:
        """Bytes of all rows, in use or not, and of prefixes."""
        planes = [plane for bucket in list(self._buckets.values()) for plane in bucket.planes]
        planes += [plane for prefix in list(self._prefixes.values()) for plane in prefix.planes]
        return sum(plane.nbytes for plane in planes)

    @property
    def most_bytes(self) -> int:
        """Bytes of `limit` tokens."""
        return self.limit * self.layout.token_bytes

    def clear(self) -> None:
        """No row is in use: nothing is kept, be it allocated or a prefix."""
        self.forget_prefixes()
        self._buckets.clear()

    # rows ----------------------------------------------------------------------------------------------------------
    def start(self, row: Row) -> bool:
        """Place a row that holds nothing, with the longest prefix that is known. False if there is no room."""
        prefix, row.fed = self._find(row)
        if not self._place(row, prefix.planes if prefix else [], len(row.ids)):
            row.fed = 0
            return False
        row.epoch, row.reused = self.epoch, row.fed
        if prefix is not None and prefix.experts is not None and row.experts is not None:
            row.experts[: row.fed] = prefix.experts[: row.fed]
        self.reused_tokens += row.fed
        return True

    def grow(self, row: Row, tokens: int, make_way: Callable[[], bool]) -> bool:
        """Move the row to where `tokens` of it fit. `make_way` drops another one, False if there is none to drop.

        False where no room was made: the row then holds nothing.
        """
        bucket = _of(row)
        planes = bucket.copy_of(row)
        bucket.remove(row)
        while not self._place(row, planes, tokens):
            if not make_way():
                row.fed = 0
                return False
        return True

    def drop(self, row: Row) -> None:
        """The row holds nothing afterwards; fine if it did before."""
        if row.bucket is not None:
            row.bucket.remove(row)
        row.fed = 0

    def _place(self, row: Row, planes: Planes, tokens: int) -> bool:
        capacity = 64  # of the smallest row
        while capacity < tokens:
            capacity *= 2
        capacity = min(capacity, self.largest_row)
        bucket = self._buckets.setdefault(capacity, Bucket(self.layout, capacity))
        if not self._have_row(bucket):
            return False
        bucket.append(row, planes)
        return True

    def _have_row(self, bucket: Bucket) -> bool:
        used, allocated = len(bucket.rows), bucket.allocated
        if used < allocated:
            return True
        more = max(4, allocated // 4)
        if not self._evict(more * bucket.capacity):
            more = 1
            if not self._evict(bucket.capacity):
                # Rows that are allocated and not in use are given up, and then prefixes.
                for one in self._buckets.values():
                    if len(one.rows) < one.allocated:
                        one.resize(len(one.rows))
                if not self._evict(bucket.capacity):
                    return False
        bucket.resize(allocated + more)
        return True

    def _free(self) -> int:
        """Tokens that nothing is allocated for."""
        rows = sum(bucket.allocated * bucket.capacity for bucket in self._buckets.values())
        return self.limit - rows - self._prefix_tokens

    def _evict(self, tokens: int) -> bool:
        """Drop the oldest prefixes until `tokens` tokens are free; none if all of them would not be enough."""
        if self._free() + self._prefix_tokens < tokens:
            return False
        while self._free() < tokens:
            self._forget(next(iter(self._prefixes.values())))
        return True

    # prefixes ------------------------------------------------------------------------------------------------------
    def keep_prefix(self, row: Row) -> None:
        """Later requests that begin as this row does copy from it. Without effect for want of room, or of new KV."""
        pages = page_names(row.ids[: row.fed], row.adapter)
        if not pages or row.epoch != self.epoch or not self._evict(row.fed):
            return
        experts = None if row.experts is None else row.experts[: row.fed].copy()
        prefix = Prefix(row.ids[: row.fed], _of(row).copy_of(row), row.adapter, experts, set(pages))
        for page in pages:
            before, self._by_page[page] = self._by_page.get(page), prefix
            if before is not None:
                before.pages.discard(page)
                if not before.pages:
                    self._forget(before)
        self._prefixes[id(prefix)] = prefix
        self._prefix_tokens += row.fed

    def forget_prefixes(self) -> None:
        """The weights are others: rows in use keep what they hold to themselves, and nothing else is left."""
        self.epoch += 1
        self._prefixes.clear()
        self._by_page.clear()
        self._prefix_tokens = 0

    def _forget(self, prefix: Prefix) -> None:
        del self._prefixes[id(prefix)]
        for page in prefix.pages:
            del self._by_page[page]
        self._prefix_tokens -= len(prefix.ids)

    def _find(self, row: Row) -> tuple[Prefix | None, int]:
        """The prefix that shares most, and how many tokens: never all of the row's, whose last gives the next token."""
        prefix = None
        for page in page_names(row.ids, row.adapter):
            if page not in self._by_page:
                break
            prefix = self._by_page[page]
        if prefix is None or prefix.adapter != row.adapter:
            return None, 0
        self._prefixes.move_to_end(id(prefix))
        shared = common_length(prefix.ids, row.ids[:-1])
        return (prefix, shared) if shared else (None, 0)


def page_names(ids: Sequence[int], adapter: str | None) -> list[int]:
    """One per whole page; each stands for the adapter and all tokens up to the page's end. Those of a prefix are
    compared as well."""
    names, name = [], hash(adapter)
    for end in range(PAGE_TOKENS, len(ids) + 1, PAGE_TOKENS):
        name = hash((name, *ids[end - PAGE_TOKENS : end]))
        names.append(name)
    return names


def common_length(one: list[int], other: list[int]) -> int:
    """Number of tokens that both begin with."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(i for i in range(most) if one[i] != other[i])


def _of(row: Row) -> Bucket:
    if row.bucket is None:
        raise RuntimeError("the request holds no keys and values")
    return row.bucket
