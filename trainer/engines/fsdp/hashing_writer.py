"""DCP's writer of checkpoint files, which takes the checksum of what a rank writes while it writes it.

Each rank leaves its files' fingerprints beside them (`checkpoint.leave_fingerprints`) before it says that it is done;
rank 0, which seals the checkpoint, reads those and no file again.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem

from penstock.trainer.state.checkpoint import leave_fingerprints
from penstock.trainer.state.hashed_files import HashingStream


class HashingWriter(FileSystemWriter):
    """One checkpoint of one rank. Files are on disk when they are closed."""

    def __init__(self, folder: Path, rank: int) -> None:
        # All tensors are on the CPU already. DCP's copy ahead would open a CUDA context on GPU 0 in every rank's writer
        # thread, about 0.5 GB each.
        super().__init__(folder, per_thread_copy_ahead=0)
        self._files = HashingFiles()
        self.fs = self._files
        self._rank = rank

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
            yield hashing
        self.written[Path(path).name] = hashing.fingerprint
