"""A server's side: a version's tensors in host memory, every byte checked.

full    read the file, check every tensor
delta   from the state that is held: apply the files after it; from any other: the newest full file and those after it
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from penstock.weight_sync.delta import read_delta
from penstock.weight_sync.file_format import verify_names, verify_tensor, verify_tensors
from penstock.weight_sync.manifest import ChainFile, Manifest, TensorEntry, WeightsRefused

logger = logging.getLogger(__name__)
Tensors = dict[str, torch.Tensor]


class WeightReader:
    """Holds the version read last, where the trainer says that deltas follow. One thread at a time calls it."""

    def __init__(self) -> None:
        self._held: Tensors = {}
        self._state: str | None = None
        """What `_held` is; None while it is nothing whole."""
        self.bytes_read = 0
        """Of all files so far."""

    def read(self, manifest: Manifest) -> Tensors:
        """The version's tensors. The next `read` may change them in place; no other code may.

        Raises `WeightsRefused` naming the tensor (or the file) that is missing, truncated or different.
        """
        files = manifest.files
        behind = self._links_behind_held(files)
        try:
            tensors = self._read(manifest, files[-behind:] if behind else []) if behind < len(files) else None
        except WeightsRefused as error:
            # A file in between is gone or damaged: what is held is of no use, the full version may be.
            logger.warning("version %d is read from its full version on: %s", manifest.version, error)
            tensors = None
        if tensors is None:
            self.forget()
            tensors = self._read(manifest, files)
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

    def _read(self, manifest: Manifest, files: Sequence[ChainFile]) -> Tensors:
        tensors, self._held = self._held, {}
        # Until the end is verified this is no version: half an update must never be the base of the next.
        state, self._state = self._state, None
        for file in files:
            _check_size(file, manifest.version)
            self.bytes_read += file.bytes
            if file.base_version is None and file is files[-1]:
                return _read_full_verified(manifest, file)
            tensors = _read_full(file) if file.base_version is None else _apply(file, state, tensors)
            state = file.state
        verify_tensors(manifest, tensors)
        return tensors


def read_verified(manifest: Manifest) -> Tensors:
    """A host copy of a version, from its full file on. Raises `WeightsRefused` as `WeightReader.read` does."""
    return WeightReader().read(manifest)


def _apply(file: ChainFile, state: str | None, tensors: Tensors) -> Tensors:
    delta = read_delta(Path(file.place))
    if delta.base_state != state:
        raise WeightsRefused(f"{file.place} changes other weights than those of version {file.base_version}")
    delta.verify()
    delta.apply(tensors)
    return tensors


def _read_full(file: ChainFile) -> Tensors:
    try:
        with safe_open(Path(file.place), framework="pt") as opened:
            return {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError) as error:
        raise WeightsRefused(f"version {file.version}: cannot read {file.place}: {error}") from error


def _read_full_verified(manifest: Manifest, file: ChainFile) -> Tensors:
    """Tensor by tensor: the check finds each one still in the processor's cache."""
    try:
        with safe_open(Path(file.place), framework="pt") as opened:
            verify_names(manifest, opened.keys())
            return {name: _read_one(opened, manifest.version, entry) for name, entry in manifest.entries.items()}
    except (OSError, SafetensorError) as error:
        raise WeightsRefused(f"version {manifest.version}: cannot read {file.place}: {error}") from error


def _read_one(opened: Any, version: int, entry: TensorEntry) -> torch.Tensor:
    # The clone is what gets checked: pages of a mapped file could still change, or go, before they are copied.
    tensor: torch.Tensor = opened.get_tensor(entry.name).clone()
    verify_tensor(version, entry, tensor)
    return tensor


def _check_size(file: ChainFile, version: int) -> None:
    try:
        found = Path(file.place).stat().st_size
    except OSError as error:
        raise WeightsRefused(f"version {version}: {file.place}: {error.strerror}") from error
    if found != file.bytes:
        raise WeightsRefused(f"version {version}: {file.place} has {found} bytes, the manifest says {file.bytes}")
