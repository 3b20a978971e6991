"""A server's side: a version's tensors in host memory, every byte checked.

full    read the file, check every tensor
delta   from the state that is held: apply the files after it; from any other: the newest full file and those after it
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from penstock.weight_sync.files.delta import read_delta
from penstock.weight_sync.files.file_format import verify_names, verify_tensor, verify_tensors
from penstock.weight_sync.files.file_reader import FileReader
from penstock.weight_sync.manifest import ChainFile, Manifest, WeightsRefused

logger = logging.getLogger(__name__)
Tensors = dict[str, torch.Tensor]


class WeightReader:
    """Holds the version read last, where the trainer says that deltas follow. One thread at a time calls it."""

    _held: Tensors
    _state: str | None
    """What `_held` is; None while it is nothing whole."""

    def __init__(self) -> None:
        self.forget()
        self.bytes_read = 0
        """Of all files so far."""

    def read(self, manifest: Manifest, own: int | None = None) -> Tensors:
        """The version's tensors. The next `read` may change them in place; no other code may.

        `own`: descriptor of the version's own file, where the caller has opened it (`open_published`).
        Raises `WeightsRefused` naming the tensor (or the file) that is missing, truncated or different.
        """
        files = manifest.files
        behind = self._links_behind_held(files)
        try:
            tensors = self._read(manifest, files[-behind:] if behind else [], own) if behind < len(files) else None
        except WeightsRefused as error:
            # A file in between is gone or damaged: what is held is of no use, the full version may be.
            logger.warning("version %d is read from its full version on: %s", manifest.version, error)
            tensors = None
        if tensors is None:
            self.forget()
            tensors = self._read(manifest, files, own)
        if manifest.deltas_follow:
            self._held, self._state = tensors, manifest.state
        else:
            self.forget()
        return tensors

    def forget(self) -> None:
        """Free the host copy; the next version is read from its full one on."""
        self._held, self._state = {}, None

    def _links_behind_held(self, files: Sequence[ChainFile]) -> int:
        """How many files lead from what is held to the version; all of them where none of it can be used."""
        for behind, file in enumerate(reversed(files)):
            if file.state == self._state:
                return behind
        return len(files)

    def _read(self, manifest: Manifest, files: Sequence[ChainFile], own: int | None) -> Tensors:
        tensors, self._held = self._held, {}
        # Until the end is verified this is no version: half an update must never be the base of the next.
        state, self._state = self._state, None
        for file in files:
            descriptor = own if file is manifest.files[-1] else None
            if file.base_version is not None:
                _apply(file, descriptor, state, tensors)
            elif file is manifest.files[-1]:
                tensors = _read_full_verified(manifest, file, descriptor)
            else:
                tensors = _read_full(file)
            self.bytes_read += file.bytes
            state = file.state
        if not files or files[-1].base_version is not None:
            verify_tensors(manifest, tensors)
        return tensors


def read_verified(manifest: Manifest) -> Tensors:
    """A host copy of a version, from its full file on. Raises `WeightsRefused` as `WeightReader.read` does."""
    return WeightReader().read(manifest)


def _apply(file: ChainFile, descriptor: int | None, state: str | None, tensors: Tensors) -> None:
    """Changes `tensors` in place."""
    delta = read_delta(file, descriptor)
    if delta.base_state != state:
        raise WeightsRefused(f"{file.place} changes other weights than those of version {file.base_version}")
    delta.apply(tensors)


def _read_full(file: ChainFile) -> Tensors:
    with FileReader(file) as opened:
        tensors = dict(opened.tensors())
        opened.verify_whole()
        return tensors


def _read_full_verified(manifest: Manifest, file: ChainFile, descriptor: int | None) -> Tensors:
    """Tensor by tensor: the check finds each one still in the processor's cache."""
    with FileReader(file, descriptor) as opened:
        verify_names(manifest, opened.names)
        tensors = {}
        for name, tensor in opened.tensors():
            verify_tensor(manifest.version, manifest.entries[name], tensor)
            tensors[name] = tensor
        opened.verify_whole()
        return tensors
