"""A model's states in host memory while the devices are an engine's: weights, moments, what else stays between steps.

Each storage is copied to a pinned buffer of the host, which is kept for the next time, and its memory on the device is
freed in place: the tensors, their views and whatever refers to them stay what they are. On CPUs the same is done; the
device's memory and the host's are one there, and the copy is another place in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class HostStates:
    """Host memory of the tensors of `states` that are on `device` at the moment."""

    def __init__(self, states: Callable[[], Iterable[Tensor]], device: torch.device) -> None:
        self._states, self._device = states, device
        self._hosts: dict[int, Tensor] = {}
        """Storage → its buffer on the host."""
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []

    @property
    def on_device(self) -> int:
        """Bytes."""
        return sum(storage.nbytes() for storage in self._storages().values())

    @torch.no_grad()
    def move_to_host(self) -> None:
        """Without effect where they are there. Raises `RuntimeError` for memory that is not torch's own to free."""
        if self._away:
            return
        storages = {key: one for key, one in self._storages().items() if one.nbytes()}
        self._away = [(storage, self._copied(key, storage)) for key, storage in storages.items()]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for storage, _ in self._away:
            storage.resize_(0)
        self._hosts = {key: self._hosts[key] for key in storages}

    @torch.no_grad()
    def move_back(self) -> None:
        """The same values in the same tensors."""
        for storage, host in self._away:
            storage.resize_(host.nbytes)
            bytes_of(storage).copy_(host, non_blocking=True)
        self._away = []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _copied(self, key: int, storage: torch.UntypedStorage) -> Tensor:
        host = self._hosts.get(key)
        if host is None or host.nbytes != storage.nbytes():
            pinned = self._device.type == "cuda"
            host = self._hosts[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
        return host.copy_(bytes_of(storage), non_blocking=True)

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
