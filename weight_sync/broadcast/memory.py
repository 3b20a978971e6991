"""Memory of streams: of one process, or shared by a machine's processes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

import torch

from penstock.common import huge_area
from penstock.weight_sync.broadcast.offer import StreamTensor
from penstock.weight_sync.files.file_format import CODES, FULL, Section, file_header


def stream_header(tensors: Iterable[StreamTensor]) -> bytes:
    """The header of the safetensors file whose data is the stream of these tensors, which are in its order.

    It has no checksums: they are known at the stream's end. The manifest has them.
    """
    sections = [
        Section(tensor.name, CODES[getattr(torch, tensor.dtype)], tensor.shape, tensor.nbytes, ()) for tensor in tensors
    ]
    return file_header(sections, {"penstock": FULL})


class SpareMemory:
    """A `huge_area` for tensors."""

    def __init__(self, nbytes: int) -> None:
        """Raises `OSError` if memory is short."""
        self.nbytes = nbytes
        self._area = huge_area(nbytes)

    def tensor(self) -> torch.Tensor:
        """[nbytes] uint8. It keeps the memory, with or without this object."""
        return torch.frombuffer(self._area, dtype=torch.uint8)[: self.nbytes]

    @property
    def is_free(self) -> bool:
        """No tensor of it is left: each refers to the area, as this object does and the call that counts."""
        return sys.getrefcount(self._area) == 2


def spare_memory(nbytes: int) -> torch.Tensor:
    """Return memory of `SpareMemory`, whose last tensor frees it."""
    return SpareMemory(nbytes).tensor()


def bucket_memory(nbytes: int) -> torch.Tensor:
    """Return memory of one bucket; pinned in a process that computes on a GPU, so that copies use the bus's full
    rate.
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return spare_memory(nbytes)


def on_host(pieces: Sequence[torch.Tensor], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Each of `pieces` of a GPU in `dtype`, cast there, in pinned memory; valid until the next is asked for.

    One is under way while the one before is used. A piece that is yielded has arrived.
    """
    longest = max(map(len, pieces), default=0)
    two = [torch.empty(longest, dtype=dtype, pin_memory=True) for _ in range(2)]

    def start(number: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        target, arrived = two[number % 2][: len(pieces[number])], torch.cuda.Event()
        target.copy_(pieces[number].to(dtype), non_blocking=True)
        arrived.record()
        return target, arrived

    under_way = [start(number) for number in range(min(1, len(pieces)))]
    for number in range(1, len(pieces) + 1):
        target, arrived = under_way.pop()
        if number < len(pieces):
            under_way.append(start(number))
        arrived.synchronize()
        yield target


def two_buckets(nbytes: int, bucket_bytes: int) -> Iterator[torch.Tensor]:
    """Yield two buckets in turn for a stream of `nbytes`: one is received while the content of the other is used."""
    remaining, two = nbytes, [bucket_memory(min(bucket_bytes, nbytes)) for _ in range(2)]
    number = 0
    while remaining:
        bucket = two[number % 2][:remaining]
        yield bucket
        remaining -= len(bucket)
        number += 1
