"""Moves the tensors that layers save for the backward to host memory in the meantime.

    forward of layer i     its saved tensors are noted; those of layer i − 1 are copied to the host, and those of
                           layer i − 2, whose copies had a layer's time, are freed on the device
    backward of layer i    those of layer i − 1 are copied back meanwhile

So the device holds what two layers save, the last two of a pack never leave it, and transfers overlap the
arithmetic of a layer. Under `recompute` what a layer saves are its inputs.

Storages are moved, not tensors: views of one, saved by several operations or layers, are copied once and come back
once. Parameters stay, they are FSDP's to free. On CUDA the copies run on a stream of their own (`SideStream`), to and
from pinned buffers (`HostBuffers`); elsewhere the same code copies at once.

One stream for both directions keeps the order: a buffer that is written again was read before. Memory of the device
that a copy reads or writes is given up only once the compute stream has waited for that copy.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.trainer.engines.fsdp.host_states import bytes_of, on_this_rank

SMALLEST_BYTES = 1 << 16
"""Smaller storages stay: the call would cost more than they hold."""
CHUNK_BYTES = 64 << 20
"""Of one pinned allocation."""
ALIGNMENT = 512
"""Of what lies in a chunk."""

Pairs = Iterable[tuple[Tensor, Tensor]]
"""(target, source) of copies."""


class Copies(Protocol):
    """Transfers between device and host, in the order of the calls."""

    def copy(self, pairs: Pairs) -> Any:
        """After what the compute stream has been given until now. Returns what `join` takes."""

    def join(self, copied: Any) -> None:
        """Order later work of the compute stream behind that copy."""


class SideStream:
    """Copies in parallel with the compute stream of a CUDA device. Streams and events are used here alone."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._stream = cuda.Stream(device)

    def copy(self, pairs: Pairs) -> Any:
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def join(self, copied: Any) -> None:
        self._cuda.current_stream(self._device).wait_event(copied)


class SynchronousCopies:
    """Copies at once, on devices without streams."""

    def copy(self, pairs: Pairs) -> None:
        for target, source in pairs:
            target.copy_(source)

    def join(self, copied: None) -> None:
        """Every copy is done when `copy` returns."""


class _Chunk:
    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.used = 0
        """Bytes, from the front."""
        self.pieces = 0
        """That lie in it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """[bytes] uint8 in a chunk."""

    bytes: Tensor
    chunk: _Chunk


class HostBuffers:
    """Host memory in chunks of one size, which are kept and used again for whatever lengths come. As many as were in
    use at once: chunks are made only while none is free."""

    def __init__(self, *, pinned: bool, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._pinned, self._chunk_bytes = pinned, chunk_bytes
        self._filled: _Chunk | None = None
        self._free: list[_Chunk] = []
        self._returned: deque[_Chunk] = deque()
        """By whichever thread, at whatever moment a tensor dies."""
        self.chunks = 0

    @property
    def nbytes(self) -> int:
        """Held, in use or not."""
        return self.chunks * self._chunk_bytes

    def take(self, nbytes: int) -> list[Piece]:
        """Return this many bytes, in one piece or several. Raises `RuntimeError` where the host has no more to pin."""
        self._collect()
        pieces = []
        while nbytes:
            if self._filled is None or self._filled.used == self._chunk_bytes:
                self._filled = self._free.pop() if self._free else self._new()
            chunk = self._filled
            piece = chunk.bytes[chunk.used : chunk.used + nbytes]
            chunk.used = min(self._chunk_bytes, -(-(chunk.used + len(piece)) // ALIGNMENT) * ALIGNMENT)
            chunk.pieces += 1
            pieces.append(Piece(piece, chunk))
            nbytes -= len(piece)
        return pieces

    def give_back(self, pieces: Sequence[Piece]) -> None:
        self._returned.extend(piece.chunk for piece in pieces)

    def _collect(self) -> None:
        while self._returned:
            chunk = self._returned.popleft()
            chunk.pieces -= 1
            if not chunk.pieces:
                chunk.used = 0
                if chunk is not self._filled:
                    self._free.append(chunk)

    def _new(self) -> _Chunk:
        try:
            chunk = _Chunk(self._chunk_bytes, pinned=self._pinned)
        except RuntimeError as error:
            raise RuntimeError(
                f"trainer.activation_offload holds {self.nbytes >> 20} MiB of host memory and can have no more: lower "
                f"trainer.micro_batch_tokens, set trainer.recompute=true, or raise the limit on locked memory ({error})"
            ) from error
        self.chunks += 1
        return chunk


class _Activation:
    """One storage that was saved: on the device, on its way, or on the host."""

    def __init__(self, saved: Tensor, copies: Copies, buffers: HostBuffers) -> None:
        storage = saved.untyped_storage()
        self.nbytes = storage.nbytes()
        self.original = StorageWeakRef(storage)
        """Keeps its address from being another's while this is here."""
        self.version = saved._version
        self._saved: Tensor | None = saved
        """Keeps it on the device."""
        self._back: torch.UntypedStorage | None = None
        self._device = saved.device
        self._copies, self._buffers = copies, buffers
        self._pieces: list[Piece] = []
        self._copied: tuple[Any] | None = None
        """Of a copy that the compute stream has not waited for."""

    def is_of(self, tensor: Tensor) -> bool:
        """Return True if `tensor` still has its storage, with the same values."""
        return not self.original.expired() and tensor._version == self.version

    def leave(self) -> None:
        """Begin the copy to the host; without effect if it was made, and on what has changed since."""
        if self._pieces or self._saved is None or self._saved._version != self.version:
            return
        self._pieces = self._buffers.take(self.nbytes)
        source = bytes_of(self._saved.untyped_storage()).split([len(piece.bytes) for piece in self._pieces])
        self._copied = (self._copies.copy(zip([piece.bytes for piece in self._pieces], source, strict=True)),)

    def free(self) -> None:
        """Free the storage on the device if it was copied."""
        if self._pieces and self._saved is not None:
            self._join()
            self._saved = None

    def come_back(self) -> None:
        """Begin the copy to the device; without effect if it is there."""
        if self._saved is not None or self._back is not None:
            return
        self._back = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device).untyped_storage()
        target = bytes_of(self._back).split([len(piece.bytes) for piece in self._pieces])
        self._copied = (self._copies.copy(zip(target, [piece.bytes for piece in self._pieces], strict=True)),)

    def storage(self) -> torch.UntypedStorage:
        """Return the storage on the device. Raises `RuntimeError` as autograd does for what was changed after it was
        saved.
        """
        if self._saved is not None:
            if self._saved._version != self.version:
                raise RuntimeError(
                    f"a tensor of shape {list(self._saved.shape)} that is needed for the gradient was changed in place "
                    f"after it was saved: it is at version {self._saved._version}, expected {self.version}"
                )
            return self._saved.untyped_storage()
        self.come_back()
        self._join()
        assert self._back is not None
        return self._back

    def _join(self) -> None:
        if self._copied is not None:
            self._copies.join(*self._copied)
            self._copied = None

    def __del__(self) -> None:
        self._join()
        self._buffers.give_back(self._pieces)


class _Layer:
    """The tensors that one call of one layer saved."""

    def __init__(self, previous: _Layer | None) -> None:
        self._previous = weakref.ref(previous) if previous is not None else None
        self._activations: list[weakref.ref[_Activation]] = []
        self._is_back = False

    def add(self, activation: _Activation) -> None:
        self._activations.append(weakref.ref(activation))

    def living(self) -> Iterator[_Activation]:
        """The last one first: so the backward needs them."""
        for reference in reversed(self._activations):
            if (activation := reference()) is not None:
                yield activation

    def come_back(self) -> None:
        """Bring the saved tensors back to the device at the beginning of the backward, then those of the layer
        before.
        """
        if self._is_back:
            return
        self._is_back = True
        before = self._previous() if self._previous is not None else None
        for layer in (self, before):
            for activation in layer.living() if layer is not None else ():
                activation.come_back()


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

    layer: _Layer
    activation: _Activation
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    split: _Split | None
    """Of a tensor that is split over ranks."""


@dataclass(frozen=True, slots=True)
class _KeptTensor:
    layer: _Layer
    tensor: Tensor


class ActivationOffload:
    """Offload of the activations of one module's layers, in the order of their calls."""

    def __init__(self, device: torch.device, copies: Copies | None = None, buffers: HostBuffers | None = None) -> None:
        on_cuda = device.type == "cuda"
        self._device = device
        self._copies = copies or (SideStream(device) if on_cuda else SynchronousCopies())
        self.buffers = buffers or HostBuffers(pinned=on_cuda)
        self._known: weakref.WeakValueDictionary[int, _Activation] = weakref.WeakValueDictionary()
        """By storage."""
        self._newest: _Layer | None = None
        self._leaving: _Layer | None = None

    def wrap(self, block: nn.Module) -> None:
        """The block's `forward` alone, in place: FSDP's hooks stay outside, so that parameters are whole inside."""
        forward: Callable[..., Any] = block.forward

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if self._leaving is not None:
                for activation in self._leaving.living():
                    activation.free()
            if self._newest is not None:
                for activation in self._newest.living():
                    activation.leave()
            self._leaving = self._newest
            layer = self._newest = _Layer(self._newest)
            staying = {on_this_rank(one).untyped_storage()._cdata for one in (*block.parameters(), *block.buffers())}
            with saved_tensors_hooks(partial(self._pack, layer, staying), _unpack):
                return forward(*args, **kwargs)

        block.forward = wrapped

    def _pack(self, layer: _Layer, staying: set[int], tensor: Tensor) -> _SavedTensor | _KeptTensor:
        local = on_this_rank(tensor)
        if type(local) not in (Tensor, nn.Parameter) or local.device.type != self._device.type:
            return _KeptTensor(layer, tensor)
        storage = local.untyped_storage()
        if storage._cdata in staying or storage.nbytes() < SMALLEST_BYTES or local.layout is not torch.strided:
            return _KeptTensor(layer, tensor)
        activation = self._known.get(storage._cdata)
        if activation is None or not activation.is_of(local):
            activation = self._known[storage._cdata] = _Activation(local.detach(), self._copies, self.buffers)
        layer.add(activation)
        offset = int(local.storage_offset())
        return _SavedTensor(layer, activation, local.dtype, offset, local.size(), local.stride(), _Split.of(tensor))


def _unpack(saved: _SavedTensor | _KeptTensor) -> Tensor:
    saved.layer.come_back()
    if isinstance(saved, _KeptTensor):
        return saved.tensor
    storage = saved.activation.storage()
    local = torch.empty(0, dtype=saved.dtype, device=storage.device)
    local.set_(storage, saved.offset, saved.size, saved.stride)
    return local if saved.split is None else saved.split.joined(local)


def offload_activations(blocks: Sequence[nn.Module], device: torch.device) -> None:
    """Wraps all `blocks`, in place; after everything else that wraps their `forward`."""
    offload = ActivationOffload(device)
    for block in blocks:
        offload.wrap(block)
