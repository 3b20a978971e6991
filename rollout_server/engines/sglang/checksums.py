"""The checksums that SGLang must report for a version's tensors (its `srt/utils/weight_checker.py`).

On CPUs SGLang takes the start of SHA-256 of a parameter's bytes; on GPUs the sum of a kernel
(`kernels/ops/memory/gpu_tensor_hash.py`), which `device_checksum` computes on the CPU. Both are sums of bytes alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.common import cores

TILE = 8192
"""Words of 32 bits that the kernel sums up before it mixes them."""
PIECE = 4 * TILE
"""Words at a time: all buffers together stay in a core's cache."""
_SEED = 0x243F6A88
_LANES = (
    (np.uint32(0x27D4EB2D), np.uint32(_SEED), 15),
    (np.uint32(0x165667B1), np.uint32((_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF), 13),
)
"""(factor and seed of a word's position, bits by which it is rotated) of the upper and lower half of the sum."""
_MASK = (1 << 64) - 1


def expected_checksums(
    tensors: Mapping[str, Any], names: Sequence[str], dtype: str, *, on_device: bool
) -> dict[str, str]:
    """Checksums, in hexadecimal, that SGLang's parameters `names` must have after loading `tensors` as `dtype`.

    Names that are not of the checkpoint (buffers) are left out. The head is the embedding where the two are tied.

    Args:
        on_device: SGLang's parameters are on a GPU.
    """
    import torch

    from penstock.rollout_server.engines.verify_loaded import parts_of

    kind: torch.dtype = getattr(torch, dtype)

    def checksum_of(parts: list[str]) -> str:
        rows = torch.cat([tensors[part].to(kind) for part in parts])
        data = rows.detach().reshape(-1).view(torch.uint8).numpy()
        return device_checksum(data) if on_device else hashlib.sha256(data.data).hexdigest()[:16]

    parts = {name: [part for part in parts_of(name) if part in tensors] for name in names}
    parts = {name: present for name, present in parts.items() if present}
    with ThreadPoolExecutor(min(8, cores())) as threads:
        return dict(zip(parts, threads.map(checksum_of, parts.values()), strict=True))


def first_difference(expected: Mapping[str, str], actual: Mapping[str, str]) -> str | None:
    """Name of the first parameter whose checksum is another one, None where all agree."""
    return next((name for name in sorted(expected) if actual.get(name) != expected[name]), None)


def folder_tensors(model: str) -> dict[str, Any]:
    """All tensors of the model folder's safetensors files, by name; empty if there are none."""
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for path in sorted(Path(model).glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def device_checksum(data: NDArray[np.uint8]) -> str:
    """The sum of SGLang's kernel for GPUs over `data` [bytes], in hexadecimal. All integers wrap around."""
    if not data.size:
        return f"{0:016x}"
    if missing := -data.size % 4:
        data = np.concatenate([data, np.zeros(missing, np.uint8)])
    words, total = data.view("<u4"), 0
    for start in range(0, len(words), PIECE):
        total += _sum_of_tiles(words[start : start + PIECE], start, data.size)
    for shift, factor in zip((30, 27), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB), strict=True):
        total &= _MASK
        total = (total ^ total >> shift) * factor & _MASK
    return f"{total ^ total >> 31:016x}"


def _sum_of_tiles(words: NDArray[np.uint32], start: int, nbytes: int) -> int:
    """Return the sum of `words` [PIECE at most], which begin at word `start` of a tensor of `nbytes`."""
    places = np.arange(start, start + len(words), dtype=np.uint32)
    mixed, shifted = np.empty_like(places), np.empty_like(places)
    halves = []
    for factor, seed, bits in _LANES:
        np.multiply(places, factor, out=mixed)
        mixed += seed
        mixed ^= np.left_shift(places, bits, out=shifted)  # with the next line: rotated
        mixed ^= np.right_shift(places, 32 - bits, out=shifted)
        mixed ^= words
        _mix(mixed, shifted)
        sums = np.add.reduceat(mixed, np.arange(0, len(words), TILE), dtype=np.uint32)
        sums ^= np.uint32(nbytes & 0xFFFFFFFF)
        halves.append(_mix(sums, np.empty_like(sums)).astype(np.uint64))
    return int(np.sum(halves[0] << np.uint64(32) | halves[1], dtype=np.uint64))


def _mix(values: NDArray[np.uint32], shifted: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """MurmurHash3's finaliser, in place; `shifted` is overwritten."""
    for shift, factor in zip((16, 13), (np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)), strict=True):
        values ^= np.right_shift(values, shift, out=shifted)
        values *= factor
    values ^= np.right_shift(values, 16, out=shifted)
    return values
