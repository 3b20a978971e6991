"""Files of a checkpoint whose checksum is taken while they are written: they are not read again for it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem

from penstock.trainer.state.checkpoint import leave_fingerprints


class HashingWriter(FileSystemWriter):
    """Writes one rank's files of a checkpoint by DCP, and takes their checksums meanwhile.

    Each rank leaves its files' fingerprints next to them before it says that it is done; rank 0, which seals the
    checkpoint, reads those and no file again. Files are on disk when they are closed.
    """

    def __init__(self, folder: Path, rank: int, *, copies: bool = True) -> None:
        """`copies`: of what is written, first; without, nothing may change it meanwhile."""
        # All tensors are on the CPU already. DCP's copy ahead would open a CUDA context on GPU 0 in every rank's writer
        # thread, about 0.5 GB each.
        super().__init__(folder, per_thread_copy_ahead=0)
        self._files = HashingFiles()
        self.fs = self._files
        self._rank = rank
        self._copies = copies

    def stage(self, state_dict: Any) -> Any:
        return super().stage(state_dict) if self._copies else state_dict

    def write_data(self, plan: Any, planner: Any) -> Any:
        """DCP waits for all ranks' results: when the checkpoint is written, every rank's fingerprints are there."""
        results = super().write_data(plan, planner)
        leave_fingerprints(Path(self.path), self._rank, self._files.written)
        return results


class HashingFiles(FileSystem):
    def __init__(self) -> None:
        self.written: dict[str, dict[str, Any]] = {}
        """Fingerprint of every file that was closed, by name."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            hashing = HashingStream(stream)
            try:
                yield hashing
            except RuntimeError as error:
                # torch writes from C++, which loses the error of the write and complains of its position.
                raise hashing.refusal or error from error
        self.written[Path(path).name] = hashing.fingerprint


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
