"""Weights in a file: ``shm`` (a file in shared memory) and ``disk`` (a shared file system) are the same code.

The file is ordinary safetensors. It appears under its name by an atomic rename and is never written again, so a reader
sees a whole version or none; a trainer that dies in the middle leaves only a ``.tmp`` that the next one removes.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from penstock.rollout_server.protocol import WeightsRefused
from penstock.rollout_server.weights.manifest import (
    NamedTensors,
    Transport,
    build_manifest,
    describe,
    entries,
    raw_bytes,
    verify_names,
    verify_tensor,
)

HEADROOM_BYTES = 16 << 20
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class NoSpace(OSError):
    """The folder's file system cannot hold another version; the message says where, how much is needed and free."""


class WeightPublisher:
    """The trainer's side: writes versions into one folder that it owns and deletes those past `keep`."""

    def __init__(self, directory: Path, transport: Transport, keep: int = 2) -> None:
        self.directory = Path(directory)
        self.transport = transport
        self.keep = max(1, keep)
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for leftover in self.directory.glob("*.tmp"):
            leftover.unlink(missing_ok=True)

    def write(self, version: int, tensors: NamedTensors) -> dict[str, Any]:
        """Write `version` and return its manifest. Raises `NoSpace` before anything is written."""
        named = [(name, tensor.detach().cpu()) for name, tensor in tensors]
        header = _header(named)
        size = len(header) + sum(tensor.nbytes for _, tensor in named)
        _check_space(self.directory, size)
        path = self._path(version)
        _write_atomically(path, header, named, durable=self.transport == "disk")
        manifest = build_manifest(version, self.transport, path, size, [describe(*item) for item in named])
        self._delete_others(version)
        return manifest

    def close(self) -> None:
        """Delete every version: the run is over."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _path(self, version: int) -> Path:
        return self.directory / f"weights-{version:08d}.safetensors"

    def _delete_others(self, version: int) -> None:
        """All but the newest up to `version`.

        Later ones are of a life that the ledger has forgotten: were they counted, the present version would go.
        """
        paths = sorted(self.directory.glob("weights-*.safetensors"))
        later = [path for path in paths if path > self._path(version)]
        for path in [*paths[: len(paths) - len(later)][: -self.keep], *later]:
            path.unlink(missing_ok=True)


def read_verified(manifest: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A host copy of a version's tensors, every byte checked.

    Raises `WeightsRefused` naming the tensor (or the file) that is missing, truncated or different.
    """
    wanted = entries(manifest)
    path = Path(manifest["path"])
    _check_size(path, manifest)
    try:
        with safe_open(path, framework="pt") as file:
            verify_names(manifest, file.keys())
            return {name: _read_one(file, manifest["version"], entry) for name, entry in wanted.items()}
    except (OSError, SafetensorError) as error:
        raise WeightsRefused(f"version {manifest['version']}: cannot read {path}: {error}") from error


def _read_one(file: Any, version: int, entry: Mapping[str, Any]) -> torch.Tensor:
    # The clone is what gets checked: pages of a mapped file could still change, or go, before they are copied.
    tensor = file.get_tensor(entry["name"]).clone()
    verify_tensor(version, entry, tensor)
    return tensor


def _check_size(path: Path, manifest: Mapping[str, Any]) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise WeightsRefused(f"version {manifest['version']}: {path}: {error.strerror}") from error
    if found != manifest["bytes"]:
        raise WeightsRefused(
            f"version {manifest['version']}: {path} has {found} bytes, the manifest says {manifest['bytes']}"
        )


def _header(named: Sequence[tuple[str, torch.Tensor]]) -> bytes:
    """safetensors: length (u64 LE), then JSON padded with spaces so that the data starts 8-aligned."""
    described, offset = {}, 0
    for name, tensor in named:
        if name in described:
            raise ValueError(f"tensor {name!r} is given twice")
        span = [offset, offset + tensor.nbytes]
        described[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        offset += tensor.nbytes
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _check_space(directory: Path, size: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < size + HEADROOM_BYTES:
        raise NoSpace(
            errno.ENOSPC,
            f"{directory} has {free >> 20} MiB free, one version of the weights needs {(size + HEADROOM_BYTES) >> 20}"
            " MiB; free some, or take another place with rollout.weight_transport",
        )


def _write_atomically(path: Path, header: bytes, named: Sequence[tuple[str, torch.Tensor]], *, durable: bool) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            _write_all(file, header, named)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_all(file: BinaryIO, header: bytes, named: Sequence[tuple[str, torch.Tensor]]) -> None:
    file.write(header)
    for _, tensor in named:
        file.write(raw_bytes(tensor))
