"""Uids of boxes: blocks of them, each locked by one process of this machine for as long as it lives.

A uid that two boxes have lets the code of one signal the processes of the other where nothing else keeps them apart,
and its limits of processes are those of both.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from penstock.sandbox.protocol import SandboxError

LOCKS = ("/run", "/run/lock", "/tmp")  # noqa: S108 - the first writable one; to /run root alone writes


class UidBlocks:
    """`uid` of slots from 0 on. `count` blocks of `size` uids each, from `first` on."""

    def __init__(self, first: int, size: int, count: int) -> None:
        self._first, self._size, self._count = first, size, count
        self._blocks: list[int] = []
        self._locks: list[int] = []
        """Open files; their locks end with this process."""
        self._pid = os.getpid()

    def uid(self, slot: int) -> int:
        """A uid that no other box on this machine has at this time. Raises `SandboxError` where all are taken."""
        if self._pid != os.getpid():  # a fork has its own blocks
            self.__init__(self._first, self._size, self._count)  # type: ignore[misc]
        while len(self._blocks) <= slot // self._size:
            self._claim()
        return self._first + self._blocks[slot // self._size] * self._size + slot % self._size

    def _claim(self) -> None:
        folder = next((one for one in LOCKS if os.access(one, os.W_OK)), None)
        # A machine with more workers than 4096 has other troubles.
        for step in range(min(4096, self._count)):
            block = (self._pid + step) % self._count
            path = Path(folder) / f"penstock-uids-{self._first}-{block}" if folder is not None else None
            if block not in self._blocks and (path is None or self._lock(path)):
                self._blocks.append(block)
                return
        raise SandboxError(f"no uids from {self._first} on are free: other processes of Penstock hold them all")

    def _lock(self, path: Path) -> bool:
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            try:
                file = os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o600 if os.geteuid() == 0 else 0o644)
            except PermissionError:  # another user's, which may have ended
                file = os.open(path, flags | os.O_RDONLY)
        except PermissionError:
            return False
        except OSError as error:
            raise SandboxError(f"{path}: uids of boxes cannot be locked: {error}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._locks.append(file)
        return True
