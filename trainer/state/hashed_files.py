"""Files of a checkpoint whose checksum is taken while they are written: they are not read again for it.

A ``.safetensors`` file is the length of its header (8 bytes, little endian), the header (JSON: name → dtype, shape,
offsets) and the tensors' bytes (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from penstock.trainer.state.checkpoint import Fingerprint

CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.uint8: "U8"}


class HashingStream(io.RawIOBase):
    """Written from beginning to end; `fingerprint` is of what was written."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._digest = xxhash.xxh3_64()
        self._bytes = 0
        self.refusal: OSError | None = None
        """Error of the disk at a write."""

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "xxh3": self._digest.hexdigest()}

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        remaining = view
        try:
            while remaining:
                remaining = remaining[self._stream.write(remaining) :]
        except OSError as error:
            self.refusal = error
            raise
        self._digest.update(view)
        self._bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self._bytes

    def fileno(self) -> int:
        """Return the descriptor; everything written before is with the kernel, for `os.fsync`."""
        self._stream.flush()
        return int(self._stream.fileno())

    def flush(self) -> None:
        if not self._stream.closed:
            self._stream.flush()

    def close(self) -> None:
        self._stream.close()
        super().close()


def save_hashed(tensors: Mapping[str, Tensor], path: Path) -> Fingerprint:
    """Write the bytes of `safetensors.torch.save_file`, readable by `load_file`. The tensors are contiguous and on the
    host. Raises `OSError`, `KeyError` for a dtype that no checkpoint has.
    """
    # Wide types first: then every tensor begins at a multiple of its width.
    ordered = sorted(tensors.items(), key=lambda one: (-one[1].element_size(), one[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the tensors begin at a multiple of 8
    with HashingStream(path.open("wb")) as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, tensor in ordered:
            if tensor.numel():
                stream.write(tensor.reshape(-1).view(torch.uint8).numpy())
        return stream.fingerprint
