"""States in host memory: all of a model's while the devices are an engine's, or AdamW's moments between steps.

`HostStates` copies each storage to pinned memory of the host, which is kept for the next time, and frees its memory on
the device in place: the tensors, their views and whatever refers to them stay what they are.

`HostAdamW`, a step:   part of the parameters:  moments host ─► device,  AdamW,  moments device ─► host;  next part

On CPUs the same is done; the device's memory and the host's are one there, and the copy is another place in it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

PART_BYTES = 1 << 30
"""About what `HostAdamW` has of its moments on the device at a time."""


class HostStates:
    """Host memory of the tensors of `states` that are on `device` at the moment."""

    def __init__(self, states: Callable[[], Iterable[Tensor]], device: torch.device) -> None:
        self._states, self._device = states, device
        self._hosts: dict[int, Tensor] = {}
        """Storage → its place on the host."""
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []

    @property
    def on_device(self) -> int:
        """Bytes."""
        return sum(storage.nbytes() for storage in self._storages().values())

    @torch.no_grad()
    def move_to_host(self) -> None:
        """Without effect if they are there. Raises `RuntimeError` for memory that is not torch's own to free."""
        if self._away:
            return
        storages = {key: one for key, one in self._storages().items() if one.nbytes()}
        sizes = {key: storage.nbytes() for key, storage in storages.items()}
        if sizes != {key: host.nbytes for key, host in self._hosts.items()}:
            self._hosts = {}  # given back before as much is taken
            self._hosts = dict(zip(sizes, pinned(list(sizes.values()), self._device), strict=True))
        for key, storage in storages.items():
            self._hosts[key].copy_(bytes_of(storage), non_blocking=True)
        self._away = [(storage, self._hosts[key]) for key, storage in storages.items()]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for storage, _ in self._away:
            storage.resize_(0)

    @torch.no_grad()
    def move_back(self) -> None:
        """The same values in the same tensors."""
        for storage, host in self._away:
            storage.resize_(host.nbytes)
            bytes_of(storage).copy_(host, non_blocking=True)
        self._away = []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _storages(self) -> dict[int, torch.UntypedStorage]:
        """Return storages by identity: tied weights, and views of one storage, are moved once."""
        parts = map(on_this_rank, self._states())
        here = (one.untyped_storage() for one in parts if one.device.type == self._device.type)
        return {storage._cdata: storage for storage in here}


def on_this_rank(tensor: Tensor) -> Tensor:
    """Return the local part itself, not a view that a collective or autograd would know of."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """[nbytes] uint8, a view."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class HostAdamW(torch.optim.AdamW):
    """AdamW of one group of parameters whose moments are in host memory between steps. Its arithmetic, and with it
    each bit of the result, is that of the parameters' device."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        parameters = group["params"]
        try:
            for part in _parts(parameters):
                hosts = {one: self.state[one] for one in part if one in self.state}
                for parameter, states in hosts.items():
                    self.state[parameter] = {
                        key: state.to(parameter.device, non_blocking=True, copy=True) for key, state in states.items()
                    }
                group["params"] = part
                super().step()
                self._move_to_host(part, hosts)
        finally:
            group["params"] = parameters

    @property
    def part_bytes(self) -> int:
        """Return the bytes of the largest part's moments, which are on the parameters' device in a step."""
        return max(map(moments_bytes, _parts(self.param_groups[0]["params"])))

    def _move_to_host(self, part: list[Tensor], hosts: Mapping[Tensor, dict[str, Tensor]]) -> None:
        """`hosts`: places of the states from the step before."""
        places: dict[Tensor, dict[str, Tensor]] = {one: self.state[one] for one in part if one in self.state}
        new = [state for one, states in places.items() if one not in hosts for state in states.values()]
        fresh = iter(on_host(new))
        for parameter, states in places.items():
            host = hosts.get(parameter) or dict(zip(states, fresh, strict=False))
            for key, state in states.items():
                host[key].copy_(state, non_blocking=True)
            self.state[parameter] = host
        if part and part[0].device.type == "cuda":
            torch.cuda.synchronize(part[0].device)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the tensors of `state_dict` as they are: torch's own method puts all moments on the device."""
        (group,), (loaded,) = self.param_groups, state_dict["param_groups"]
        for parameter, number in zip(group["params"], loaded["params"], strict=True):
            self.state[parameter] = dict(state_dict["state"].get(number, {}))
        group |= {key: value for key, value in loaded.items() if key != "params"}


def _parts(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the parameters in their order, in parts whose two moments have about `PART_BYTES`."""
    part: list[Tensor] = []
    nbytes = 0
    for parameter in parameters:
        part.append(parameter)
        nbytes += moments_bytes([parameter])
        if nbytes >= PART_BYTES:
            yield part
            part, nbytes = [], 0
    yield part


def moments_bytes(parameters: Iterable[Tensor]) -> int:
    """Return the bytes of AdamW's two moments of each, and of its number of steps."""
    return sum(2 * on_this_rank(one).nbytes + 4 for one in parameters)


def on_host(tensors: list[Tensor]) -> list[Tensor]:
    """Return empty tensors like `tensors`, of which each may be sharded, in host memory."""
    locals_ = [on_this_rank(one) for one in tensors]
    if not locals_:
        return []
    places = pinned([one.nbytes for one in locals_], locals_[0].device)
    hosts = [place.view(one.dtype).view(one.shape) for place, one in zip(places, locals_, strict=True)]
    return [
        DTensor(host, one._spec, requires_grad=False) if isinstance(one, DTensor) else host
        for one, host in zip(tensors, hosts, strict=True)
    ]


ALIGNMENT = 64
"""Bytes, of each place: what vector instructions ask for."""


class _LockedPages(mmap.mmap):
    """Pages of the host that CUDA may have locked, and unlocks before they are unmapped: afterwards the address may
    already be another mapping's."""

    unlock: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


def pinned(sizes: list[int], device: torch.device) -> list[Tensor]:
    """Return places of `sizes` bytes in one buffer of the host, page-locked if `device` is a GPU.

    torch's own pinned memory is rounded up to a power of two, each allocation (CachingHostAllocator.h); this is not.
    """
    starts = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
    pages = _LockedPages(-1, max(1, starts[-1]))
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    if device.type == "cuda":
        runtime, address = torch.cuda.cudart(), buffer.data_ptr()
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, len(pages), 0)))
        pages.unlock = partial(runtime.cudaHostUnregister, address)
    return [buffer[start : start + size] for start, size in zip(starts, sizes, strict=False)]
