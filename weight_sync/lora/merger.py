"""Merges adapters into full versions on a server, and reads the model folder of version 0.

    merge   read and verify the adapter ─ compare the base's state ─ check that its tensors fit ─ then tensor by tensor:
            read from the folder, verify, add s·B·A in float32, round to the engine's dtype, checksum, write

Engines load the result like any full version, with any number of ranks. Its checksums are taken on this machine and not
announced: another machine may round the last bit of a sum differently.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from penstock.common import private_folder
from penstock.weight_sync.files.file_format import FULL, Section, describe, verify_tensor, write_file
from penstock.weight_sync.files.reader import read_verified
from penstock.weight_sync.lora.adapter import AdapterConfig, BadAdapter, LowRank, changes_of, check_base
from penstock.weight_sync.manifest import ChainFile, Manifest, TensorEntry, WeightsRefused, WeightsUnreachable, state_of

DEADLINE_S = 300.0


class ModelFolder:
    """Mapped, not held: what is read comes from the disk or its cache. One thread at a time calls it."""

    def __init__(self, folder: Path) -> None:
        """Raises `WeightsRefused` where the folder has no safetensors that could be read."""
        self.folder = Path(folder)
        self._files = _open(self.folder)
        self._entries: dict[str, TensorEntry] = {}

    def entries(self) -> dict[str, TensorEntry]:
        """Returns the manifest entry of each tensor by name. The first call reads every byte and caches them."""
        if not self._entries:
            self._entries = {name: describe(name, file.get_tensor(name)) for name, file in self._files.items()}
        return self._entries

    def state(self) -> str:
        """The state of the folder as 16 hex digits; equal on all machines that have the same files."""
        return state_of(self.entries().values())

    def read(self, name: str) -> torch.Tensor:
        """A copy of one tensor. Raises `WeightsRefused` if it is not what it was when all were read first."""
        tensor: torch.Tensor = self._files[name].get_tensor(name).clone()
        verify_tensor(0, self.entries()[name], tensor)
        return tensor


def _open(folder: Path) -> dict[str, Any]:
    """The open file of each tensor, by name."""
    files: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            file = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise WeightsRefused(f"the model folder's {path} cannot be read: {error}") from error
        files.update(dict.fromkeys(file.keys(), file))
    if not files:
        raise WeightsRefused(f"{folder} has no safetensors: adapters need the weights of version 0")
    return files


Changes = Mapping[str, LowRank]


class Merger:
    """Owns `directory`, which holds one merged version. One thread at a time merges; `close` may come from another."""

    def __init__(self, model: Path, directory: Path, dtype: str, *, deadline_s: float = DEADLINE_S) -> None:
        self.directory = Path(directory)
        self._model, self._dtype, self._deadline_s = Path(model), getattr(torch, dtype), deadline_s
        self._base: ModelFolder | None = None
        self._adapter: Manifest | None = None
        self._merged: Manifest | None = None
        """The full version that `_adapter` was merged into."""
        self._busy = threading.Lock()
        self._closed = threading.Event()

    def merge(self, manifest: Manifest) -> Manifest:
        """The manifest of the full version. Raises `WeightsRefused` naming the tensor, `WeightsUnreachable` (no room).

        The file of the version before is deleted first: the engine has loaded it long ago.
        """
        with self._busy:
            if self._merged is None or manifest != self._adapter or not Path(self._merged.place).is_file():
                self._merged, self._adapter = self._merge(manifest), manifest
            return self._merged

    def close(self) -> None:
        """Break off what is under way and delete the files."""
        self._closed.set()
        with self._busy:
            self._forget()

    def _merge(self, manifest: Manifest) -> Manifest:
        assert manifest.adapter is not None
        give_up_at, version = time.monotonic() + self._deadline_s, manifest.version
        tensors = read_verified(manifest)
        base = self._base or ModelFolder(self._model)
        try:
            changes = changes_of(AdapterConfig.from_peft(manifest.adapter.config), tensors)
            if (state := base.state()) != manifest.adapter.base:
                raise BadAdapter(
                    f"the adapter is for other weights of version 0 than {base.folder} has (state {state}, wanted"
                    f" {manifest.adapter.base})"
                )
            check_base(changes, base.entries())
        except (BadAdapter, KeyError, TypeError) as error:
            raise WeightsRefused(f"version {version}: {error}") from error
        self._base = base
        self._forget()
        try:
            return self._write(version, changes, base, give_up_at)
        except OSError as error:  # no room, most likely; there may be some later
            raise WeightsUnreachable(f"version {version}: not merged: {error}") from error

    def _write(self, version: int, changes: Changes, base: ModelFolder, give_up_at: float) -> Manifest:
        private_folder(self.directory)
        described: list[TensorEntry] = []

        def make(name: str) -> torch.Tensor:
            self._may_go_on(version, give_up_at)
            tensor = base.read(name)
            tensor = changes[name].add_to(tensor, self._dtype) if name in changes else tensor
            described.append(describe(name, tensor))
            return tensor

        sections = [
            Section.computed(name, self._dtype_of(entry, name in changes), entry.shape, partial(make, name))
            for name, entry in base.entries().items()
        ]
        path = self.directory / f"merged-{version:08d}.safetensors"
        written = write_file(path, sections, {"penstock": FULL}, durable=False)
        file = ChainFile(version, None, str(path), written.bytes, written.xxh3, state_of(described))
        return Manifest("shm", (file,), tuple(described))

    def _dtype_of(self, entry: TensorEntry, changed: bool) -> torch.dtype:
        """Only what is changed is rounded: a model may keep some tensors in another dtype than the engine's."""
        own: torch.dtype = getattr(torch, entry.dtype)
        return self._dtype if changed else own

    def _may_go_on(self, version: int, give_up_at: float) -> None:
        if self._closed.is_set():
            raise WeightsUnreachable(f"version {version}: not merged: this server stops")
        if time.monotonic() > give_up_at:
            raise WeightsUnreachable(f"version {version}: not merged in {self._deadline_s:g} s")

    def _forget(self) -> None:
        for path in (*self.directory.glob("merged-*"), *self.directory.glob(".merged-*.tmp")):
            path.unlink(missing_ok=True)
