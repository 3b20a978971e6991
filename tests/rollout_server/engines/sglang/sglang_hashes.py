"""Hashes of known bytes by SGLang's own kernel for GPUs, which Triton interprets on a CPU.

cd tests/rollout_server/engines/sglang && TRITON_INTERPRET=1 SGLANG_PYTHON sglang_hashes.py > sglang_hashes.json
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

SIZES = (0, 1, 3, 4, 1000, 4 * 8192, 4 * 8192 + 6, 4 * 3 * 8192 + 4)
"""In bytes; a tile has 8192 words of four."""


def bytes_of(size: int) -> bytes:
    return bytes((7 * i + i // 251) % 256 for i in range(size))


def read_hashes() -> dict[str, str]:
    """Hash by number of bytes, as SGLang reports it. Runs in SGLang's environment."""
    import torch

    module = _without_device_checks()
    return {
        str(size): f"{module.gpu_tensor_hash(torch.frombuffer(bytearray(bytes_of(size)), dtype=torch.uint8)):016x}"
        if size
        else f"{module.gpu_tensor_hash(torch.empty(0, dtype=torch.uint8)):016x}"
        for size in SIZES
    }


def _without_device_checks() -> Any:
    """SGLang's module; interpreted kernels take tensors in host memory, which it refuses."""
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.submodule_search_locations
    source = Path(package.submodule_search_locations[0]) / "kernels/ops/memory/gpu_tensor_hash.py"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "interpreted.py"
        copy.write_text("\n".join(line for line in source.read_text().splitlines() if "assert t" not in line))
        spec = importlib.util.spec_from_file_location("interpreted", copy)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    json.dump(read_hashes(), sys.stdout, indent=1)
    print()
