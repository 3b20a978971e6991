"""The weights of version 0: the safetensors files of the model folder that trainer and servers start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from penstock.weight_sync.chain import state_of
from penstock.weight_sync.errors import WeightsRefused
from penstock.weight_sync.manifest import describe, verify_tensor


class ModelFolder:
    """Mapped, not held: what is read comes from the disk or its cache. One thread at a time calls it."""

    def __init__(self, folder: Path) -> None:
        """Raises `WeightsRefused` where the folder has no safetensors that could be read."""
        self.folder = Path(folder)
        self._files = _open(self.folder)
        self._entries: dict[str, dict[str, Any]] = {}

    def names(self) -> list[str]:
        return list(self._files)

    def entries(self) -> dict[str, dict[str, Any]]:
        """A manifest's entry of each tensor, by name. The first call reads every byte; then it is remembered."""
        if not self._entries:
            self._entries = {name: describe(name, file.get_tensor(name)) for name, file in self._files.items()}
        return self._entries

    def state(self) -> str:
        """What the folder holds, as 16 hex digits; the same on all machines that have the same files."""
        return state_of(self.entries().values())

    def read(self, name: str) -> torch.Tensor:
        """A copy of one tensor. Raises `WeightsRefused` where it is not what it was when all were read first."""
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
