"""A version's file as SGLang wants it, and what SGLang must hold after loading it.

SGLang loads a folder of safetensors files, and tells the checksum of every parameter that it holds. On CPUs that is the
start of the SHA-256 of its bytes, so each of them can be computed from the file, fused ones from their parts. Whether a
server's checksums are of that kind is found out at its start, on the weights that it came up with.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.rollout_server.engines.checkpoint import Shapes, check_complete
from penstock.weight_sync import WeightsRefused


class VersionReader:
    """Reads versions, whole or as changes of the one before, into what SGLang can be shown."""

    def __init__(self, shapes: Shapes) -> None:
        from penstock.weight_sync import WeightReader

        self._shapes = shapes
        self._reader = WeightReader()

    def read(self, manifest: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
        """(descriptor of a safetensors file with the whole version, its tensors). Raises `WeightsRefused`.

        The descriptor is the caller's to close. A trainer that deletes the file meanwhile changes nothing.
        """
        tensors = self._reader.read(manifest)
        check_complete(manifest, self._shapes)
        if manifest.get("base_version") is not None:
            return file_in_memory(tensors), tensors
        try:
            return os.open(manifest["path"], os.O_RDONLY | os.O_CLOEXEC), tensors
        except OSError as error:
            raise WeightsRefused(f"version {manifest['version']}: {manifest['path']}: {error.strerror}") from error


def file_in_memory(tensors: Mapping[str, Any]) -> int:
    """Descriptor of a safetensors file that is on no disk: what a delta leads to was never written as one."""
    from penstock.weight_sync import write_tensors

    file = os.memfd_create("weights", os.MFD_CLOEXEC)
    try:
        with os.fdopen(file, "wb", closefd=False) as out:
            write_tensors(out, tensors)
    except BaseException:
        os.close(file)
        raise
    return file


@contextmanager
def shown_as_folder(file: int, folder: Path) -> Iterator[Path]:
    """`folder`, holding nothing but a link to this process's descriptor `file`; both go at the end."""
    try:
        folder.mkdir()
        (folder / "model.safetensors").symlink_to(f"/proc/{os.getpid()}/fd/{file}")
        yield folder
    finally:
        os.close(file)
        shutil.rmtree(folder, ignore_errors=True)


def expected_checksums(tensors: Mapping[str, Any], names: list[str], dtype: str) -> dict[str, str]:
    """What SGLang's parameters `names` must have as checksums, in hexadecimal, after loading `tensors` as `dtype`.

    Names that are not of the checkpoint (buffers) are left out. The head is the embedding where the two are tied.
    """
    import torch

    from penstock.rollout_server.engines.held_check import parts_of

    kind: torch.dtype = getattr(torch, dtype)
    parts = {name: [part for part in parts_of(name) if part in tensors] for name in names}
    return {
        name: _checksum(torch.cat([tensors[part].to(kind) for part in found])) for name, found in parts.items() if found
    }


def first_difference(expected: Mapping[str, str], found: Mapping[str, str]) -> str | None:
    """Name of the first parameter whose checksum is another one, None where all agree."""
    return next((name for name in sorted(expected) if found.get(name) != expected[name]), None)


def folder_tensors(model: str) -> dict[str, Any]:
    """All tensors of the model folder's safetensors files, by name; empty where there are none."""
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for path in sorted(Path(model).glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def _checksum(tensor: Any) -> str:
    import torch

    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(memoryview(raw)).hexdigest()[:16]
