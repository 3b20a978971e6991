"""A server's side: a version's tensors in host memory, every byte checked.

full    read the file, check every tensor
delta   from the state that is held: apply the files behind it; from any other: the newest full one and all behind it
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from penstock.weight_sync.chain import Link, links_of, state_of
from penstock.weight_sync.delta_file import read_delta
from penstock.weight_sync.errors import WeightsRefused
from penstock.weight_sync.manifest import entries, verify_names, verify_tensor, verify_tensors

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

    def read(self, manifest: Mapping[str, Any]) -> Tensors:
        """The version's tensors. The next `read` may change them in place; nobody else may.

        Raises `WeightsRefused` naming the tensor (or the file) that is missing, truncated or different.
        """
        entries(manifest)
        links = links_of(manifest)
        behind = self._links_behind_held(links)
        try:
            tensors = self._read(manifest, links[-behind:] if behind else []) if behind < len(links) else None
        except WeightsRefused as error:
            # A file in between is gone or damaged: what is held is of no use, the full version may be.
            logger.warning("version %d is read from its full version on: %s", manifest["version"], error)
            tensors = None
        if tensors is None:
            self.forget()
            tensors = self._read(manifest, links)
        if manifest.get("deltas_follow"):
            self._held, self._state = tensors, state_of(manifest["tensors"])
        else:
            self.forget()
        return tensors

    def forget(self) -> None:
        """Free the host copy; the next version is read from its full one on."""
        self._held, self._state = {}, None

    def _links_behind_held(self, links: Sequence[Link]) -> int:
        """How many files lead from what is held to the version; all of them where none of it can be used."""
        for behind, link in enumerate(reversed(links)):
            if link.state == self._state:
                return behind
        return len(links)

    def _read(self, manifest: Mapping[str, Any], links: Sequence[Link]) -> Tensors:
        tensors, self._held = self._held, {}
        # Until the end is verified this is no version: half an update must never be the base of the next.
        state, self._state = self._state, None
        for link in links:
            _check_size(link, manifest["version"])
            self.bytes_read += link.bytes
            if link.base_version is None and link is links[-1]:
                return _read_full_verified(manifest, link)
            tensors = _read_full(link) if link.base_version is None else _apply(link, state, tensors)
            state = link.state
        verify_tensors(manifest, tensors)
        return tensors


def read_verified(manifest: Mapping[str, Any]) -> Tensors:
    """A host copy of a version, from its full file on. Raises `WeightsRefused` as `WeightReader.read` does."""
    return WeightReader().read(manifest)


def _apply(link: Link, state: str | None, tensors: Tensors) -> Tensors:
    delta = read_delta(Path(link.place))
    if delta.base_state != state:
        raise WeightsRefused(f"{link.place} changes other weights than those of version {link.base_version}")
    delta.verify()
    delta.apply(tensors)
    return tensors


def _read_full(link: Link) -> Tensors:
    try:
        with safe_open(Path(link.place), framework="pt") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError) as error:
        raise WeightsRefused(f"version {link.version}: cannot read {link.place}: {error}") from error


def _read_full_verified(manifest: Mapping[str, Any], link: Link) -> Tensors:
    """Tensor by tensor: the check finds each one still in the processor's cache."""
    wanted = entries(manifest)
    try:
        with safe_open(Path(link.place), framework="pt") as file:
            verify_names(manifest, file.keys())
            return {name: _read_one(file, manifest["version"], entry) for name, entry in wanted.items()}
    except (OSError, SafetensorError) as error:
        raise WeightsRefused(f"version {manifest['version']}: cannot read {link.place}: {error}") from error


def _read_one(file: Any, version: int, entry: Mapping[str, Any]) -> torch.Tensor:
    # The clone is what gets checked: pages of a mapped file could still change, or go, before they are copied.
    tensor: torch.Tensor = file.get_tensor(entry["name"]).clone()
    verify_tensor(version, entry, tensor)
    return tensor


def _check_size(link: Link, version: int) -> None:
    try:
        found = Path(link.place).stat().st_size
    except OSError as error:
        raise WeightsRefused(f"version {version}: {link.place}: {error.strerror}") from error
    if found != link.bytes:
        raise WeightsRefused(f"version {version}: {link.place} has {found} bytes, the manifest says {link.bytes}")
