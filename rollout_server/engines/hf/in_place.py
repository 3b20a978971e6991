"""The hf engine receives broadcasts in place: under the pause, each bucket straight into the model's parameters.

    receive(offer)     plan ─ join the group ─ (decoding is paused) ─ buckets into parameters ─ every checksum again
    holds(manifest)    what came is what was announced: the caller labels it, and decoding continues

From the first bucket on the model holds no version. Whatever ends the broadcast, decoding is paused until then, or
until a whole file was loaded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.weight_sync import (
    HubNames,
    JoinedBroadcast,
    Manifest,
    Membership,
    Offer,
    StreamTensor,
    TensorEntry,
    TensorPart,
    UnmappedTensors,
    WeightsBroken,
    WeightsRefused,
    WeightsUnreachable,
    as_tensor,
    checksum,
    file_parts,
    open_published,
    state_of,
    tensor_parts,
)


class PausableBatcher(Protocol):
    """The part of a batcher that can be paused."""

    @property
    def stands_still(self) -> bool: ...

    def halt(self) -> None:
        """Between two passes; none follows until `go_on` or `swap`."""

    def go_on(self) -> None: ...


class DamagedMemory(Exception):
    """A parameter does not hold what was copied into it; the message names it."""


@dataclass(frozen=True, slots=True)
class _Destination:
    """Destination of a tensor of the stream."""

    parameter: str
    stored: tuple[str, ...]
    """The stream's tensors of which the parameter is made."""
    bytes: torch.Tensor | None
    """The parameter's memory, [nbytes] uint8, where the tensor's bytes are the parameter's; else it is put together."""


class InPlaceTargets:
    """The parameters of a model, as the tensors of one stream fill them."""

    def __init__(
        self, model: torch.nn.Module, tensors: Sequence[StreamTensor], names: HubNames | None, version: int
    ) -> None:
        """Touches nothing. Raises `WeightsRefused` naming a tensor unless these fill every parameter."""
        self._version, self._names = version, names
        self._state = model.state_dict()
        self._parts: dict[str, torch.Tensor] = {}
        """Tensors of parameters that are put together and are not complete."""
        self._joined_checksums: dict[str, str] = {}
        """Checksums of parameters that were put together."""
        offered = {tensor.name: tensor for tensor in tensors}
        self._destinations = dict(self._plan(offered))
        filled = {self._state[one.parameter].data_ptr() for one in self._destinations.values()}
        if missing := next((name for name, target in self._state.items() if target.data_ptr() not in filled), None):
            raise WeightsRefused(f"version {version}: tensor {missing!r} is missing")

    def write(self, part: TensorPart) -> None:
        """Parts come in the order of the stream, each once."""
        name = part.tensor.name
        destination = self._destinations[name]
        if destination.bytes is not None:
            part.write(destination.bytes)
            return
        if not part.begin:
            self._parts[name] = torch.empty(part.tensor.nbytes, dtype=torch.uint8)
        part.write(self._parts[name])
        if not part.is_last:
            return
        self._parts[name] = as_tensor(self._parts[name], part.tensor)
        if all(stored in self._parts for stored in destination.stored):
            target = self._state[destination.parameter]
            parts = {stored: self._parts.pop(stored) for stored in destination.stored}
            joined = self._joined(destination.parameter, parts)
            with torch.no_grad():
                target.copy_(joined)
            self._joined_checksums[destination.parameter] = checksum(joined.to(target.dtype))

    def check_tied(self, entries: Iterable[TensorEntry]) -> None:
        """Raises `WeightsRefused` where tensors of one parameter differ. `entries`: of the whole stream."""
        first_entries: dict[int, TensorEntry] = {}
        for entry in entries:
            destination = self._destinations[entry.name]
            twin = first_entries.setdefault(self._state[destination.parameter].data_ptr(), entry)
            if len(destination.stored) == 1 and twin.xxh3 != entry.xxh3:
                raise WeightsRefused(
                    f"version {self._version}: tensors {twin.name!r} and {entry.name!r} are tied but differ"
                )

    def verify(self, entries: Iterable[TensorEntry]) -> None:
        """Compares the model with the received tensors, `entries` of the whole stream. Raises `DamagedMemory`."""
        for entry in entries:
            destination = self._destinations[entry.name]
            xxh3 = entry.xxh3 if destination.bytes is not None else self._joined_checksums[destination.parameter]
            if checksum(self._state[destination.parameter]) != xxh3:
                raise DamagedMemory(f"tensor {entry.name!r} does not hold what was copied into it")

    def _plan(self, offered: dict[str, StreamTensor]) -> Iterable[tuple[str, _Destination]]:
        for name, parts in self._names.parts.items() if self._names else ():
            if parts.names != (name,) and all(stored in offered for stored in parts.names):
                destination = self._made_of(name, [offered.pop(stored) for stored in parts.names])
                yield from ((stored, destination) for stored in parts.names)
        for name, tensor in offered.items():
            yield name, self._made_of(name, [tensor])

    def _made_of(self, parameter: str, tensors: Sequence[StreamTensor]) -> _Destination:
        target, stored = self._state.get(parameter), tuple(tensor.name for tensor in tensors)
        if target is None:
            raise WeightsRefused(f"version {self._version}: the model has no tensor {parameter!r}")
        forms = {one.name: torch.empty(one.shape, dtype=_dtype(one), device="meta") for one in tensors}
        joined = self._joined(parameter, forms)
        if joined.shape != target.shape:
            raise WeightsRefused(
                f"version {self._version}: tensor {stored[0]!r} makes shape {list(joined.shape)}, the model's is"
                f" {list(target.shape)}"
            )
        if joined.dtype != target.dtype and not (joined.is_floating_point() and target.is_floating_point()):
            text = f"version {self._version}: tensor {stored[0]!r} is {tensors[0].dtype}, the model's is not"
            raise WeightsRefused(text)
        alike = len(stored) == 1 and joined.dtype == target.dtype and target.is_contiguous()
        return _Destination(parameter, stored, target.reshape(-1).view(torch.uint8) if alike else None)

    def _joined(self, parameter: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        if self._names is None or (len(tensors) == 1 and parameter in tensors):
            return next(iter(tensors.values()))
        try:
            return self._names.join(parameter, tensors)
        except (UnmappedTensors, RuntimeError) as error:  # torch's, of shapes that do not go together
            raise WeightsRefused(f"version {self._version}: tensor {parameter!r} cannot be made: {error}") from error


class InPlaceReceiver:
    """The engine's process has one. Its methods are for one thread at a time, not the decoding one."""

    def __init__(self, model: torch.nn.Module, batcher: PausableBatcher, names: Callable[[], HubNames | None]) -> None:
        self._model, self._batcher, self._names = model, batcher, names
        self._whole: tuple[str, str] | None = None
        """(name of the broadcast, state of its tensors) of what the model holds and the trainer has not announced."""
        self._write_s = 0.0
        self._membership = Membership()

    def receive(self, offer: Offer) -> str:
        """The state of what came. Blocks; decoding is paused afterwards.

        Raises `WeightsRefused`, `WeightsUnreachable`: nothing was touched and decoding continues. `WeightsBroken`: the
        model holds no version, and decoding is paused. `DamagedMemory`: only a new process is safe.
        """
        if self._batcher.stands_still:
            raise WeightsUnreachable(f"version {offer.version}: the engine waits for a file")
        targets = InPlaceTargets(self._model, offer.tensors, self._names(), offer.version)
        with closing(JoinedBroadcast(offer, self._membership)) as joined:
            self._batcher.halt()
            began = time.perf_counter()
            try:
                for part in tensor_parts(offer.tensors, joined.buckets()):
                    targets.write(part)
            except WeightsUnreachable:
                self._batcher.go_on()
                raise
        try:
            targets.check_tied(joined.entries)
        except WeightsRefused as error:
            raise WeightsBroken(str(error)) from error
        targets.verify(joined.entries)
        self._write_s = time.perf_counter() - began
        state = state_of(joined.entries)
        self._whole = offer.name, state
        return state

    def holds(self, manifest: Manifest) -> bool:
        """Returns True if the model has exactly this version by broadcast: every name, shape, dtype and checksum."""
        return manifest.transport == "broadcast" and self._whole == (manifest.broadcast_name, manifest.state)

    def accept(self) -> float:
        """Marks the received weights as current. Returns the receive time in seconds."""
        self._whole = None
        return self._write_s

    def forget(self) -> None:
        """Something else is about to be loaded."""
        self._whole = None

    @contextmanager
    def opened(self, manifest: Manifest) -> Iterator[Callable[[], None]]:
        """A file that `can_stream`: all of it was compared with the manifest, and the call copies it into the model, no
        second copy of it in between. It reads the same open file, compares again and raises `DamagedMemory`.

        Raises `WeightsRefused`.
        """
        file = open_published(manifest.files[-1])
        try:
            for _ in file_parts(manifest, file):
                pass
            tensors = [StreamTensor(entry.name, entry.shape, entry.dtype) for entry in manifest.tensors]
            targets = InPlaceTargets(self._model, tensors, self._names(), manifest.version)
            targets.check_tied(manifest.tensors)
            self._whole = None

            def copy() -> None:
                try:
                    for part in file_parts(manifest, file):
                        targets.write(part)
                except WeightsRefused as error:
                    raise DamagedMemory(f"the file changed while it was copied: {error}") from error
                targets.verify(manifest.tensors)

            yield copy
        finally:
            os.close(file)


def _dtype(tensor: StreamTensor) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return dtype
