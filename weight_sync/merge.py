"""A server's side of adapters: adapter + model folder ──► a full version on this machine, for its engine.

    read and verify the adapter ── is the base the trainer's? ── do its tensors fit? ── one tensor after the other:
    read from the folder, verify, add s·B·A in float32, round to the engine's dtype, take its checksum, write

Engines load the result as any full version, whatever they are and however many ranks share it. It is of this machine
alone: another one may round the last bit of a sum differently, so its checksums are taken here, not announced.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.weight_sync.adapter import AdapterConfig, BadAdapter, LowRank, changes_of, check_base
from penstock.weight_sync.chain import Link, links_of, state_of
from penstock.weight_sync.errors import WeightsRefused, WeightsUnreachable
from penstock.weight_sync.manifest import build_manifest, describe
from penstock.weight_sync.model_folder import ModelFolder
from penstock.weight_sync.reader import read_verified
from penstock.weight_sync.tensor_file import FULL, Section, write_file

DEADLINE_S = 300.0
Changes = Mapping[str, LowRank]


class Merger:
    """Owns `directory`, which holds one merged version. One thread at a time merges; `close` may come from another."""

    def __init__(self, model: Path, directory: Path, dtype: str, *, deadline_s: float = DEADLINE_S) -> None:
        self.directory = Path(directory)
        self._model, self._dtype, self._deadline_s = Path(model), getattr(torch, dtype), deadline_s
        self._base: ModelFolder | None = None
        self._adapter: dict[str, Any] = {}
        self._merged: dict[str, Any] = {}
        """What `_adapter`, a manifest, led to."""
        self._busy = threading.Lock()
        self._closed = threading.Event()

    def merge(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """The manifest of the full version. Raises `WeightsRefused` naming the tensor, `WeightsUnreachable` (no room).

        The file of the version before is deleted first: the engine has loaded it long ago.
        """
        with self._busy:
            if manifest != self._adapter or not Path(self._merged["path"]).is_file():
                self._merged, self._adapter = self._merge(manifest), dict(manifest)
            return self._merged

    def close(self) -> None:
        """Break off what is under way and delete the files."""
        self._closed.set()
        with self._busy:
            self._forget()

    def _merge(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        give_up_at, version = time.monotonic() + self._deadline_s, links_of(manifest)[-1].version
        tensors = read_verified(manifest)
        base = self._base or ModelFolder(self._model)
        try:
            changes = changes_of(AdapterConfig.from_peft(manifest["adapter"]["config"]), tensors)
            _check_same_base(base, manifest["adapter"]["base"])
            check_base(changes, base.entries())
        except (BadAdapter, KeyError, TypeError) as error:
            raise WeightsRefused(f"version {version}: {error}") from error
        self._base = base
        self._forget()
        try:
            return self._write(version, changes, base, give_up_at)
        except OSError as error:  # no room, most likely; there may be some later
            raise WeightsUnreachable(f"version {version}: not merged: {error}") from error

    def _write(self, version: int, changes: Changes, base: ModelFolder, give_up_at: float) -> dict[str, Any]:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        described: list[dict[str, Any]] = []

        def make(name: str) -> torch.Tensor:
            self._may_go_on(version, give_up_at)
            tensor = base.read(name)
            tensor = changes[name].add_to(tensor, self._dtype) if name in changes else tensor
            described.append(describe(name, tensor))
            return tensor

        sections = [
            Section.computed(name, self._dtype_of(entry, name in changes), entry["shape"], partial(make, name))
            for name, entry in base.entries().items()
        ]
        path = self.directory / f"merged-{version:08d}.safetensors"
        written = write_file(path, sections, {"penstock": FULL}, durable=False)
        link = Link(version, None, str(path), written.bytes, written.xxh3, state_of(described))
        return build_manifest("shm", [link], described)

    def _dtype_of(self, entry: Mapping[str, Any], changed: bool) -> torch.dtype:
        """Only what is changed is rounded: a model may keep some tensors in another dtype than the engine's."""
        own: torch.dtype = getattr(torch, entry["dtype"])
        return self._dtype if changed else own

    def _may_go_on(self, version: int, give_up_at: float) -> None:
        if self._closed.is_set():
            raise WeightsUnreachable(f"version {version}: not merged: this server stops")
        if time.monotonic() > give_up_at:
            raise WeightsUnreachable(f"version {version}: not merged in {self._deadline_s:g} s")

    def _forget(self) -> None:
        self._adapter, self._merged = {}, {}
        for path in self.directory.glob("merged-*"):
            path.unlink(missing_ok=True)


def _check_same_base(base: ModelFolder, expected: str) -> None:
    if (found := base.state()) != expected:
        raise BadAdapter(
            f"the adapter is for other weights of version 0 than {base.folder} has (state {found}, wanted {expected})"
        )
