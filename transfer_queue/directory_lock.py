"""One owner at a time for a directory: two servers on one append-only file would destroy it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from penstock.transfer_queue.types import QueueError


class DirectoryLock:
    """Held from `take` to `release`; the kernel lets go of it when the process dies, however it dies."""

    def __init__(self, directory: Path, other: str) -> None:
        """`other` names in the error who else may hold it."""
        self._directory = directory
        self._other = other
        self._descriptor: int | None = None

    def take(self) -> None:
        """Raises `QueueError` where it is held, by this process too."""
        descriptor = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise QueueError(f"{self._directory}: {self._other} is running there") from error
        self._descriptor = descriptor

    def release(self) -> None:
        """Twice is harmless."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
