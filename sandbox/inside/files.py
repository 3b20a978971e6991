"""Files in and out, opened inside the box: a symlink or ``..`` leads only where the box's code can go."""

from __future__ import annotations

import os
import stat


def write(path: str, data: bytes, root: str | None) -> None:
    """Raises OSError, also where `path` is not a regular file (opening a FIFO must not block the driver)."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    fd = os.open(_checked(path, root), flags, 0o644)
    try:
        _require_regular(fd, path)
        os.ftruncate(fd, 0)
        while data:
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)


def read(path: str, max_bytes: int, root: str | None) -> bytes:
    fd = os.open(_checked(path, root), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _require_regular(fd, path)
        data = b""
        while len(data) < max_bytes and (chunk := os.read(fd, max_bytes - len(data))):
            data += chunk
        return data
    finally:
        os.close(fd)


def _require_regular(fd: int, path: str) -> None:
    """/proc has regular files too, which the driver would open with its own rights: its memory, its oom_score_adj."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise PermissionError(1, "not a regular file", path)
    if os.path.isdir("/proc") and found.st_dev == os.stat("/proc").st_dev:
        raise PermissionError(1, "a file of /proc", path)


def _checked(path: str, root: str | None) -> str:
    """Where nothing but this check keeps paths in (no box around), refuse what resolves outside `root`."""
    if "\0" in path:
        raise FileNotFoundError(2, "path holds a NUL", path.replace("\0", "\\0"))
    if root is not None and not os.path.realpath(path).startswith(os.path.realpath(root) + os.sep):
        raise PermissionError(1, "outside the session's folder", path)
    return path
