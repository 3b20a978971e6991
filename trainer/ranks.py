"""The trainer's processes as one group: who am I, and the few collectives that the loop needs.

    rank = (data · C + context) · T + tensor        C · T neighbours hold one copy of the model together

Every method is a collective: all ranks call it, in the same order, from the thread that does the torch work.
Data travels as numbers and JSON, never pickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Ranks:
    """Owns the process group: `open` makes it, `close` ends it."""

    def __init__(
        self, device: torch.device, background: dist.ProcessGroup | None, group: dist.ProcessGroup | None = None
    ) -> None:
        """`group`: a part of the processes; None: all."""
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.device = device
        self.group = group
        self.background = background
        """A group of its own for checkpoint writing: its collectives must not mix with those of the steps."""
        self.data = self
        """The ranks that hold other rows than this one: one of each copy of the model. Sums over tokens and episodes
        are over these; the others of a copy hold the same rows."""
        self.context: Ranks | None = None
        """The ranks that share out the tokens of this one's packs; None: it has its packs alone."""
        self.tensor_size = 1
        """Ranks that share out each matrix."""

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def leads(self) -> bool:
        """First of its copy of the model: does once what concerns the copy's rows."""
        return self.rank % (self.world // self.data.world) == 0

    @classmethod
    def open(cls, timeout_s: float, *, context: int = 1, tensor: int = 1) -> Ranks:
        """gloo for CPUs, nccl for GPUs; under torchrun its ranks, otherwise a group of this process alone.

        `context` and `tensor`: how many share a copy of the model; their product divides the number of ranks.
        """
        cuda = torch.cuda.is_available()
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        timeout = timedelta(seconds=timeout_s)
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            # Alone there is nobody to find; loopback keeps gloo from looking up this machine's name.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        ranks = cls(device, dist.new_group(backend="gloo", timeout=timeout))
        ranks._divide(context, tensor, backend, timeout)
        return ranks

    def _divide(self, context: int, tensor: int, backend: str, timeout: timedelta) -> None:
        copy = context * tensor
        if self.world % copy:
            raise ValueError(f"{self.world} ranks cannot hold copies of {context} x {tensor} (context x tensor) ranks")
        self.tensor_size = tensor
        copies = range(self.world // copy)

        def part(members: list[list[int]]) -> Ranks:
            """Of these disjoint lists of ranks, which all give alike, the group of the one that this rank is in."""
            group, _ = dist.new_subgroups_by_enumeration(members, timeout=timeout, backend=backend)
            return Ranks(self.device, None, group)

        if copy > 1:
            self.data = part([[data * copy + place for data in copies] for place in range(copy)])
        if context > 1:
            places = [(data, t) for data in copies for t in range(tensor)]
            self.context = part([[(data * context + c) * tensor + t for c in range(context)] for data, t in places])

    @cached_property
    def mesh(self) -> DeviceMesh:
        """[shards, tensor] where matrices are split, else [shards]: over what weights lie. The first use is a
        collective."""
        if self.tensor_size == 1:
            return init_device_mesh(self.device.type, (self.world,), mesh_dim_names=("shards",))
        sizes = (self.shards, self.tensor_size)
        return init_device_mesh(self.device.type, sizes, mesh_dim_names=("shards", "tensor"))

    @property
    def shards(self) -> int:
        """Over how many ranks each weight, or each part of a split one, is sharded; gradients are averaged over
        them."""
        return self.world // self.tensor_size

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def sum(self, value: float) -> float:
        return self._reduce(value, dist.ReduceOp.SUM)

    def max(self, value: float) -> float:
        return self._reduce(value, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        return self.max(float(flag)) > 0

    def gather(self, value: Any) -> list[Any]:
        """JSON data of every rank, by rank; floats arrive exactly."""
        if self.world == 1:
            return [value]
        encoded = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        longest = int(self.max(len(encoded)))
        padded = torch.full((longest,), ord(" "), dtype=torch.uint8)
        padded[: len(encoded)] = encoded
        received = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(received, padded, group=self.group)
        return [json.loads(bytes(part.tolist())) for part in received]

    def gather_numbers(self, mine: Tensor) -> list[Tensor]:
        """[K, M] of every rank, by rank: the same K and dtype, another M."""
        if self.world == 1:
            return [mine]
        sizes = self.gather(mine.shape[1])
        padded = torch.zeros(mine.shape[0], max(sizes), dtype=mine.dtype)
        padded[:, : mine.shape[1]] = mine
        received = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(received, padded, group=self.group)
        return [part[:, :size] for part, size in zip(received, sizes, strict=True)]

    def from_first(self, value: Any) -> Any:
        """Rank 0's JSON data on every rank."""
        return self.gather(value if self.first else None)[0]

    def _reduce(self, value: float, operation: Any) -> float:
        if self.world == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, operation, group=self.group)
        return float(tensor)


def merge_by_name(parts: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """name → the values of all parts that have it."""
    names = {name for part in parts for name in part}
    return {name: [part[name] for part in parts if name in part] for name in sorted(names)}
