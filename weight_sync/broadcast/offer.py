"""The agreement of trainer and servers before a version is broadcast. No torch: a sidecar reads it.

    POST /broadcasts {"count": 2, "wire": "nccl/2.27.3,gloo/2"}   a server with two workers waits for the next version
      200 Offer        its places in that version's group, and the tensors that come
      204              none began; ask again
      409              no wire in common: this server takes files

Each rank of the trainer that has bytes of a version sends them in a separate group. Rank 0 is in all groups: it needs
all bytes for the checksums and the file. A worker has the same rank in all of them.

    group of rank 0    0: rank 0    1 … n: workers
    group of rank r    0: rank r    1 … n: workers    n + 1: rank 0

The *stream* of a version is the bytes of all its tensors, one after the other, those of larger items first: so each
tensor is aligned in it. The version's file is a header and the stream. A bucket is a range of the stream. All
members begin its messages in one order: by rank, a rank's in the stream's order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import xxhash

from penstock.weight_sync.manifest import TensorEntry

GLOO = "gloo/2"
"""The wire between host memories. It changes with what members send each other; a group has one wire."""
NCCL = "nccl/"
"""Begins the name of the wire between GPUs; NCCL's version follows, which must be the same on all members."""
BUCKET_BYTES = 32 << 20
SILENCE_S = 10.0
"""A member that takes or brings nothing for so long ends the broadcast for those who wait for it."""
FORMING_S = 60.0
"""NCCL takes tens of seconds for a communicator over several machines, or on a GPU that it has not used yet."""
ITEM_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class _Typed(Protocol):
    @property
    def dtype(self) -> str: ...


T = TypeVar("T", bound=_Typed)


@dataclass(frozen=True, slots=True)
class StreamTensor:
    """One tensor of a stream."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """``float32`` for `torch.float32`."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Member:
    """One process's place in a group. Rank 0 there sends."""

    port: int
    """Port of the group's store, at the trainer."""
    group: str
    """Named after the broadcast that it is formed for; of several, with the rank that sends."""
    rank: int
    size: int
    bucket_bytes: int
    silence_s: float = SILENCE_S
    wire: str = GLOO

    @property
    def silence(self) -> timedelta:
        return timedelta(seconds=self.silence_s)

    def in_group(self, sender: int) -> Member:
        """Return the same rank in the group of the trainer's rank `sender`; `self` names all groups of the members."""
        return replace(self, group=f"{self.group}/{sender}", size=self.size + (sender > 0))

    def forms_for(self, broadcast: str) -> bool:
        """Return True if the group is formed for `broadcast`, and not one that stands since an earlier one."""
        return self.group.partition("/")[0] == broadcast


@dataclass(frozen=True, slots=True)
class Offer:
    """One server's places in a version's groups: a rank for each of its workers."""

    version: int
    port: int
    name: str
    """Name of the broadcast."""
    group: str
    """Same as `Member.group`: the name of the first broadcast of these members."""
    first_rank: int
    count: int
    """Ranks ``first_rank … first_rank + count − 1`` are this server's workers."""
    size: int
    bucket_bytes: int
    silence_s: float
    deadline_s: float
    """A server that does not have all by then takes the file."""
    tensors: tuple[StreamTensor, ...]
    """Tensors in the stream's order."""
    splits: tuple[tuple[int, ...], ...]
    """The bytes of a tensor on each of the trainer's ranks, for every way in which tensors lie."""
    split_of: tuple[int, ...]
    """Number of each tensor's split."""
    orders: tuple[tuple[int, ...], ...] = ()
    """The ranks in the order of their bytes, for every one of `splits`, empty where it is ascending; (): it always is.
    """
    trainer: str = ""
    """Host of the group's store, as the server reaches it."""
    here: str = ""
    """This machine's address on the way there."""
    wire: str = GLOO

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def member(self, worker: int) -> Member:
        """The rank of this server's worker of that number, 0 … `count` − 1, in no group yet."""
        rank = self.first_rank + worker
        return Member(self.port, self.group, rank, self.size, self.bucket_bytes, self.silence_s, self.wire)

    @property
    def seat(self) -> str:
        """Names this server's places in the groups: who has received all still has them."""
        return seat_name(self.group, self.first_rank)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def parse(cls, plain: object) -> Offer:
        """Raises `ValueError` if it is none."""
        if not isinstance(plain, Mapping):
            raise ValueError(f"the trainer's offer is {plain!r:.100}")
        try:
            tensors = tuple(
                StreamTensor(tensor["name"], tuple(tensor["shape"]), tensor["dtype"]) for tensor in plain["tensors"]
            )
            splits, orders = (tuple(map(tuple, listed)) for listed in (plain["splits"], plain.get("orders", ())))
            lie = {"splits": splits, "split_of": tuple(plain["split_of"]), "orders": orders}
            offer = cls(**{**plain, "tensors": tensors, **lie})
        except (TypeError, KeyError) as error:
            raise ValueError(f"the trainer's offer cannot be read: {error!r}") from error
        _check(offer)
        return offer


def seat_name(group: str, first_rank: int) -> str:
    return f"{group}/{first_rank}"


def sending_ranks(splits: Iterable[tuple[int, ...]]) -> list[int]:
    """Return the trainer's ranks that have bytes, and rank 0: in its group members say that they have all."""
    return sorted({0}.union(rank for split in splits for rank, nbytes in enumerate(split) if nbytes))


def stream_order(tensors: Iterable[T]) -> list[T]:
    """Larger items first, otherwise as they come. Raises `ValueError` for a dtype that has no place."""
    listed = list(tensors)
    if odd := next((tensor.dtype for tensor in listed if tensor.dtype not in ITEM_BYTES), None):
        raise ValueError(f"tensors of {odd} cannot be broadcast; set rollout.weight_transport=http")
    return sorted(listed, key=lambda tensor: -ITEM_BYTES[tensor.dtype])


class StreamDigests:
    """Checksums of a stream's tensors, from its pieces in their order."""

    def __init__(self, tensors: Iterable[StreamTensor]) -> None:
        self._tensors = list(tensors)
        self._checksums: list[str] = []
        self._digest = xxhash.xxh3_64()
        self._missing = self._tensors[0].nbytes if self._tensors else 0
        self._close_whole()

    def update(self, piece: memoryview) -> None:
        """Raises `ValueError` for more bytes than the tensors have."""
        while len(piece):
            if len(self._checksums) == len(self._tensors):
                raise ValueError("the stream is longer than its tensors")
            part = piece[: self._missing]
            self._digest.update(part)
            self._missing -= len(part)
            piece = piece[len(part) :]
            self._close_whole()

    def entries(self) -> tuple[TensorEntry, ...]:
        """Raises `ValueError` where bytes are missing."""
        if len(self._checksums) < len(self._tensors):
            raise ValueError(f"the stream ends within tensor {self._tensors[len(self._checksums)].name!r}")
        pairs = zip(self._tensors, self._checksums, strict=True)
        return tuple(TensorEntry(tensor.name, tensor.shape, tensor.dtype, xxh3) for tensor, xxh3 in pairs)

    def _close_whole(self) -> None:
        """Tensors without a byte as well."""
        while not self._missing and len(self._checksums) < len(self._tensors):
            self._checksums.append(self._digest.hexdigest())
            self._digest = xxhash.xxh3_64()
            following = len(self._checksums)
            self._missing = self._tensors[following].nbytes if following < len(self._tensors) else 0


def _check(offer: Offer) -> None:
    """Check an offer, which decides how much memory a worker takes and what it connects to."""
    for part in fields(offer):
        value = getattr(offer, part.name)
        kind = {"int": int, "str": str, "float": (int, float)}.get(str(part.type), tuple)
        if isinstance(value, bool) or not isinstance(value, kind):  # type: ignore[arg-type]
            raise ValueError(f"the trainer's offer has {part.name}={value!r:.100}")
    for tensor in offer.tensors:
        sound = isinstance(tensor.name, str) and tensor.dtype in ITEM_BYTES
        if not sound or not all(type(size) is int and size >= 0 for size in tensor.shape):
            raise ValueError(f"the trainer's offer has a tensor {tensor!r:.200}")
    if not all(type(nbytes) is int and nbytes >= 0 for split in offer.splits for nbytes in split):
        raise ValueError(f"the trainer's offer has splits {offer.splits!r:.200}")
    of_splits = offer.orders or ((),) * len(offer.splits)
    if len(of_splits) != len(offer.splits) or not all(map(_is_order, of_splits, offer.splits)):
        raise ValueError(f"the trainer's offer has orders {offer.orders!r:.200} of its splits")
    try:
        sizes = [sum(offer.splits[number]) for number in offer.split_of]
    except (IndexError, TypeError) as error:
        raise ValueError(f"the trainer's offer has splits of tensors {offer.split_of!r:.200}") from error
    if sizes != [tensor.nbytes for tensor in offer.tensors]:
        raise ValueError("the trainer's offer has splits of other sizes than its tensors")
    if offer.bucket_bytes < 1 or not 1 <= offer.first_rank <= offer.size - offer.count:
        raise ValueError(f"the trainer's offer has ranks from {offer.first_rank} of {offer.size}")


def _is_order(order: tuple[int, ...], split: tuple[int, ...]) -> bool:
    """Each rank that has bytes is in it once."""
    known = all(type(rank) is int and 0 <= rank < len(split) for rank in order)
    return not order or (known and len(set(order)) == len(order) and sum(split[rank] for rank in order) == sum(split))
