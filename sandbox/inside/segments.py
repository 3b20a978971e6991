"""System V shared memory: unlike all else in memory it outlives every process that made or used it."""

from __future__ import annotations

import ctypes
import os

IPC_RMID = 0
TABLE = "/proc/sysvipc/shm"
"""Of the reader's own namespace. After a line of headings: key, shmid, perms, size, cpid, lpid, nattch, ..."""


def remove_orphans() -> None:
    """Those that nobody is attached to and whose maker is gone: left to count against the box, they starve later runs.

    Only for the first process of a box, whose namespace is the box's alone.
    """
    try:
        with open(TABLE, encoding="ascii") as file:
            lines = file.read().splitlines()[1:]
    except OSError:  # a kernel without System V memory
        return
    for fields in map(str.split, lines):
        segment, maker, attached = int(fields[1]), int(fields[4]), int(fields[6])
        if attached == 0 and not os.path.exists(f"/proc/{maker}"):
            ctypes.CDLL(None).shmctl(segment, IPC_RMID, None)
