"""The trainer's processes as one group: the place of a rank, its collectives and its torch thread.

Every method is a collective: all ranks call it, in the same order, from the thread that does the torch work.
Data travels as numbers and JSON, never pickled. One thread does all
torch work of a rank, so the event loop stays free and collectives keep one order.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.trainer.ranks.layout import RANKS_FILE_VARIABLE, RankLayout


class Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


class Ranks:
    """Owns the process group: `open` makes it, `close` ends it."""

    def __init__(
        self,
        device: torch.device,
        background: dist.ProcessGroup | None,
        layout: RankLayout = RankLayout(),
        timeout: timedelta = timedelta(minutes=10),
        patient: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.layout = layout
        self.timeout = timeout
        """After which a collective that not all ranks have come to ends with an error."""
        self._patient = patient
        """Separate group for waits that may rightly be longer; None: the timeout of all others."""
        self.device = device
        self.background = background
        """Separate group for checkpoint writing: its collectives must not mix with those of the steps. See
        `await_saves` for its deadline."""
        self.saves_timeout_s = timeout.total_seconds()
        place = layout.place(self.rank, self.world)
        self.is_replica_leader = place.is_replica_leader
        """First of its copy of the model: does once what concerns the copy's rows."""
        self._owned: dict[Any, Any] = {}
        self.data: Ranks = self if layout.ranks == 1 else Replicas(self, layout)
        """The copies of the model, each as one rank: sums over tokens and episodes are over these."""

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    @classmethod
    def open(cls, timeout_s: float, layout: RankLayout = RankLayout(), *, patience_s: float | None = None) -> Ranks:
        """gloo for CPUs, nccl for GPUs; under torchrun its ranks, otherwise a group of this process alone.

        Their meeting place is `rendezvous_store`.

        Args:
            timeout_s: of a collective.
            patience_s: of `meet`, `from_rank0` and the writing of checkpoints (until `await_saves`), before which ranks
                may rightly wait for one another; None: the same.
        """
        # gloo's threads live as long as anything refers to their group, an engine's reference cycles for one. A thread
        # that drops its last tensor when the interpreter is gone aborts the process: rank -6 after a sound run.
        atexit.register(gc.collect)
        cuda = torch.cuda.is_available()
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        timeout = timedelta(seconds=timeout_s)
        rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
        store = rendezvous_store()
        if store is None:
            dist.init_process_group(backend, timeout=timeout)
        else:
            # All on this machine: loopback keeps gloo from looking up its name, and from listening on its address.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        patience = timeout if patience_s is None else timedelta(seconds=max(patience_s, timeout_s))
        background, patient = (dist.new_group(backend="gloo", timeout=patience) for _ in range(2))
        return cls(device, background, layout, timeout, patient)

    def own(self, make: Callable[[Ranks], C]) -> C:
        """The one `make(self)` of these ranks: made at the first call, closed before the process group is."""
        if make not in self._owned:
            self._owned[make] = make(self)
        return self._owned[make]

    def close(self) -> None:
        for owned in self._owned.values():
            owned.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def await_saves(self, timeout_s: float) -> None:
        """Ranks wait so long for each other's part of a checkpoint from here on. None may be under way."""
        if self.background is not None:
            dist.destroy_process_group(self.background)
        self.saves_timeout_s = timeout_s
        self.background = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def sum(self, value: float) -> float:
        return self._reduce(value, dist.ReduceOp.SUM)

    def max(self, value: float) -> float:
        return self._reduce(value, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        return self.max(float(flag)) > 0

    def meet(self, timeout_s: float | None = None) -> None:
        """All ranks are here when it returns, however long each worked or waited before.

        `timeout_s`: in place of the group's own; the ranks that are missing then are named. Raises `RuntimeError`.
        """
        if self.world == 1:
            return
        if timeout_s is None:
            dist.barrier(group=self._patient)
        else:
            dist.monitored_barrier(self._patient, timedelta(seconds=timeout_s), wait_all_ranks=True)

    def gather(self, value: Any) -> list[Any]:
        """JSON data of every rank, by rank; floats arrive exactly."""
        if self.world == 1:
            return [value]
        encoded = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        longest = int(self.max(len(encoded)))
        padded = torch.full((longest,), ord(" "), dtype=torch.uint8)
        padded[: len(encoded)] = encoded
        received = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(received, padded)
        return [json.loads(bytes(part.tolist())) for part in received]

    def gather_numbers(self, mine: Tensor) -> list[Tensor]:
        """[K, M] of every rank, by rank: the same K and dtype, another M."""
        if self.world == 1:
            return [mine]
        sizes = self.gather(mine.shape[1])
        padded = torch.zeros(mine.shape[0], max(sizes), dtype=mine.dtype)
        padded[:, : mine.shape[1]] = mine
        received = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(received, padded)
        return [part[:, :size] for part, size in zip(received, sizes, strict=True)]

    def from_rank0(self, value: Any) -> Any:
        """Rank 0's JSON data on every rank, however long it took rank 0 to have it."""
        self.meet()
        return self.gather(value if self.is_rank0 else None)[0]

    def _reduce(self, value: float, operation: Any) -> float:
        if self.world == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, operation)
        return float(tensor)


class Replicas(Ranks):
    """Copies of a model that spans several ranks, each copy as one rank: `rank` of `world`.

    All processes call, and all hear the same; of each copy, what one of them says counts. A copy's last stage has
    numbers that the others lack.
    """

    def __init__(self, everyone: Ranks, layout: RankLayout) -> None:
        place = layout.place(everyone.rank, everyone.world)
        self.rank = place.replica
        self.world = place.replicas
        self.device = everyone.device
        self.background = everyone.background
        self.is_replica_leader = place.is_replica_leader
        self.timeout = everyone.timeout
        self.data = self
        self._everyone = everyone
        self._reports = place.reports
        self._reporters = layout.reporters(everyone.world)

    def sum(self, value: float) -> float:
        return self._everyone.sum(value if self._reports else 0.0)

    def max(self, value: float) -> float:
        return self._everyone.max(value)

    def meet(self, timeout_s: float | None = None) -> None:
        self._everyone.meet(timeout_s)

    def gather(self, value: Any) -> list[Any]:
        """JSON data of every copy, by copy."""
        everything = self._everyone.gather(value)
        return [everything[rank] for rank in self._reporters]

    def gather_numbers(self, mine: Tensor) -> list[Tensor]:
        """[K, M] of every copy, by copy: the same K and dtype, another M."""
        everything = self._everyone.gather_numbers(mine)
        return [everything[rank] for rank in self._reporters]


def merge_by_name(parts: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """name → the values of all parts that have it."""
    names = {name for part in parts for name in part}
    return {name: [part[name] for part in parts if name in part] for name in sorted(names)}


P = ParamSpec("P")
T = TypeVar("T")


class TorchThread:
    """`await in_torch(function, *args)` runs it in the thread; calls run one after the other, in order."""

    def __init__(self, threads: int) -> None:
        # The number of OpenMP threads belongs to the thread that sets it, hence in the initializer.
        self._pool = ThreadPoolExecutor(1, "torch", initializer=torch.set_num_threads, initargs=(threads,))

    async def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(function, *args, **kwargs))

    def close(self) -> None:
        """Calls not yet begun are dropped; one under way is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def rendezvous_store() -> dist.Store | None:
    """Return the store for ranks of one machine; a rank without torchrun is alone. None: torchrun's environment says
    where to go.
    """
    if "RANK" not in os.environ:
        return dist.HashStore()
    file = os.environ.get(RANKS_FILE_VARIABLE)
    return dist.FileStore(file, int(os.environ["WORLD_SIZE"])) if file else None
