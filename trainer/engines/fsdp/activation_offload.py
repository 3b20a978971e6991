"""Keeps what layers save for the backward in host memory.

Like `torch.autograd.graph.save_on_cpu`, with three differences: parameters stay, they are FSDP's to free; a storage
that several operations of a layer save is copied once; of a tensor that is split over ranks the local part is copied.

On CUDA the copies go to and from pinned memory on the compute stream, so that nothing is freed or changed before it is
copied. So the device holds what one layer saves. Under `recompute` these are its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.trainer.engines.fsdp.host_states import bytes_of, on_this_rank

SMALLEST_BYTES = 1 << 16
"""Smaller storages stay: the call would cost more than they hold."""


@dataclass(frozen=True, slots=True)
class _Split:
    """The layout of a DTensor, without its values."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> _Split | None:
        if not isinstance(tensor, DTensor):
            return None
        return cls(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())

    def joined(self, local: Tensor) -> DTensor:
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


@dataclass(frozen=True, slots=True)
class _SavedTensor:
    """Stands in for a tensor in autograd's graph: the way to make it again."""

    host: Tensor  # [bytes] uint8, its whole storage
    device: torch.device
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    split: _Split | None


class _Layer:
    """The tensors that one call of one layer saves."""

    def __init__(self, block: nn.Module, device: torch.device) -> None:
        self._device = device
        self._staying = {on_this_rank(one).untyped_storage()._cdata for one in (*block.parameters(), *block.buffers())}
        self._copies: dict[int, tuple[StorageWeakRef, int, Tensor]] = {}
        """Address of a storage → the storage, its version when it was copied, the copy."""

    def pack(self, tensor: Tensor) -> Tensor | _SavedTensor:
        local = on_this_rank(tensor)
        if type(local) not in (Tensor, nn.Parameter) or local.device.type != self._device.type:
            return tensor
        storage = local.untyped_storage()
        if storage._cdata in self._staying or storage.nbytes() < SMALLEST_BYTES or local.layout is not torch.strided:
            return tensor
        original, version, host = self._copies.get(storage._cdata, (None, 0, None))
        if original is None or host is None or original.expired() or version != local._version:
            host = copy_to_host(storage)
            self._copies[storage._cdata] = StorageWeakRef(storage), local._version, host
        offset = int(local.storage_offset())
        return _SavedTensor(host, local.device, local.dtype, offset, local.size(), local.stride(), _Split.of(tensor))


def copy_to_host(storage: torch.UntypedStorage) -> Tensor:
    """Return the bytes in host memory, pinned for a storage of a CUDA device; the copy may still be under way."""
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    return host.copy_(bytes_of(storage), non_blocking=True)


def _unpack(saved: Tensor | _SavedTensor) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    storage = torch.empty_like(saved.host, device=saved.device).copy_(saved.host, non_blocking=True).untyped_storage()
    local = torch.empty(0, dtype=saved.dtype, device=saved.device)
    local.set_(storage, saved.offset, saved.size, saved.stride)
    return local if saved.split is None else saved.split.joined(local)


def offload_activations(blocks: Sequence[nn.Module], device: torch.device) -> None:
    """Wraps the `forward` of all `blocks`, in place; after everything else that wraps it. FSDP's hooks stay outside, so
    that parameters are whole inside."""

    def wrap(block: nn.Module) -> None:
        forward: Callable[..., Any] = block.forward

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            with saved_tensors_hooks(_Layer(block, device).pack, _unpack):
                return forward(*args, **kwargs)

        block.forward = wrapped

    for block in blocks:
        wrap(block)
