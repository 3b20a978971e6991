"""Files that are whole or absent, line files that grow, and locks that end with their holder. Standard library only.

write_atomically, atomic_path          a reader sees the old file or the new one
private_folder, open_private           in places where every user may write, as /dev/shm
fsync_path, fsync_tree, write_synced   what survives a power cut
read_jsonl, append_jsonl, JsonlTail    one JSON object per line; a line cut short by a crash is expected
FileLock                               flock: the kernel releases it when the holder dies, however it dies
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

logger = logging.getLogger(__name__)
LOCK_POLL_S = 0.2


# whole or absent ---------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def atomic_path(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yields a temporary path next to `path`, for whatever writes there, and renames it to `path` at the end.

    A block that raises leaves `path` as it was and no temporary file. The temporary name holds process and thread, so
    that two writers never share one; a killed writer's may stay (``.NAME.*.tmp``).

    Args:
        durable: file, name and folder entry survive a power cut when the block has ended.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        yield temporary
        if durable:
            fsync_path(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_path(path.parent)


def write_atomically(
    path: Path, content: str | bytes | Iterable[bytes], *, mode: int = 0o666, durable: bool = False
) -> None:
    """Replaces `path` by a file with `content` (text as UTF-8): a reader sees the old one or the new one, whole.

    Args:
        mode: permissions of a new file before the umask, from its first byte on; 0o600 for secrets.
        durable: it survives a power cut when this returns.
    """
    with atomic_path(path, durable=durable) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(_parts(content))


def write_synced(path: Path, content: str | bytes | Iterable[bytes], *, mode: int = 0o600) -> None:
    """Writes `path` in place and returns when its bytes are on the disk; its name is so after `fsync_path(folder)`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.writelines(_parts(content))
        file.flush()
        os.fsync(file.fileno())


def fsync_path(path: Path) -> None:
    """A file's bytes, or a folder's entries, are on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Syncs a folder with everything below it."""
    for path in folder.rglob("*"):
        fsync_path(path)
    fsync_path(folder)


def _parts(content: str | bytes | Iterable[bytes]) -> Iterable[bytes]:
    if isinstance(content, str):
        return (content.encode(),)
    return (content,) if isinstance(content, bytes) else content


# private -----------------------------------------------------------------------------------------------------------
class NotPrivate(OSError):
    """A path may be another user's; the message has the path, its kind, owner and mode, and what to do."""


def private_folder(path: Path) -> Path:
    """Makes `path`, mode 0700, or accepts a folder there that this user alone may enter; returns it.

    Missing parents are made likewise. A user who could write into the folder could exchange what is read from it, so
    anything else under that name raises `NotPrivate`: another user's folder, a link, one that is open to others.
    """
    if not path.parent.exists():
        private_folder(path.parent)
    try:
        # Made closed: a folder that is closed later may have a stranger's files, or open descriptors, by then.
        path.mkdir(mode=0o700)
    except FileExistsError:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise _not_private(path, status, "a folder of this user alone, mode 0700") from None
    return path


def open_private(path: Path, mode: Literal["xb", "x+b", "a+b"], *, buffering: int = -1) -> IO[bytes]:
    """Opens a file of this user alone, mode 0600: ``xb`` a new one, ``x+b`` the same to be read as well, ``a+b`` also
    one that is there.

    Links are not followed. Raises `NotPrivate` where the name has something else.
    """
    try:
        return open(path, mode, buffering=buffering, opener=_open_own)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ELOOP, errno.EISDIR, errno.EACCES):
            raise
        raise _not_private(path, path.lstat(), "a new file of this user") from error


def _open_own(path: str, flags: int) -> int:
    # Not blocking: the open of a pipe that no other process opens would not return.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink != 1:
            raise _not_private(Path(path), status, "a file of this user alone, under one name")
        os.fchmod(descriptor, 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _not_private(path: Path, status: os.stat_result, required: str) -> NotPrivate:
    what = f"{stat.filemode(status.st_mode)}, owner uid {status.st_uid}, {status.st_nlink} links"
    return NotPrivate(
        errno.EPERM,
        f"{path}: found {what}; needed is {required} (uid {os.geteuid()}). Its owner could read or exchange what"
        " this run keeps there: look who it was, and remove it",
    )


# line files --------------------------------------------------------------------------------------------------------
def read_jsonl(path: Path, *, broken: Literal["stop", "skip"] = "stop") -> list[dict[str, Any]]:
    """The lines of a file; empty if the file does not exist.

    Args:
        broken: treatment of a line that is not JSON (left by a crash, or being written): ``stop`` ends the reading with
            a warning, ``skip`` passes over it.
    """
    return list(iter_jsonl(path, broken=broken))


def iter_jsonl(path: Path, *, broken: Literal["stop", "skip"] = "stop") -> Iterator[dict[str, Any]]:
    """Yields the lines that `read_jsonl` returns, one in memory at a time: files of a run grow with its steps."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            try:
                line = json.loads(text)
            except ValueError:
                if broken == "stop":
                    logger.warning("%s: line %d is cut short and left out", path, number)
                    break
            else:
                yield line


def append_jsonl(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Appends to the file, in one write."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def rewrite_jsonl(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Replaces the file atomically; without lines, no new file is created.

    `lines` may be read from the file itself, one at a time.
    """
    encoded = (f"{json.dumps(line, ensure_ascii=False)}\n".encode() for line in lines)
    first = next(encoded, None)
    if first is not None or path.exists():
        write_atomically(path, chain([first or b""], encoded))


def end_last_line(path: Path) -> None:
    """Ends a line that a killed writer left unfinished, so that the next one does not become part of it."""
    if path.exists() and (size := path.stat().st_size):
        with path.open("rb+") as file:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")


def last_by(rows: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """One row per integer value of `key`, in its order; of several the last one counts: a crash repeats some."""
    newest = {int(row[key]): row for row in rows}
    return [newest[value] for value in sorted(newest)]


class JsonlTail:
    """Reads a growing file line by line, each line once; from the beginning if it was replaced or cut.

    The inode alone does not tell a replaced file: a disk gives a freed one to the next file. So the line that was read
    last must still be in its place.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0
        self._last = b""

    def read(self) -> list[dict[str, Any]]:
        """Complete lines since the last call; an unfinished line is returned by a later one."""
        return list(self.lines())

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yields the lines that `read` returns, one in memory at a time; the next call yields the rest.

        A complete line that is not a JSON is left out with a warning.
        """
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(max(self._offset - len(self._last), 0))
            if os.fstat(file.fileno()).st_ino != self._inode or file.read(len(self._last)) != self._last:
                self._inode, self._offset, self._last = os.fstat(file.fileno()).st_ino, 0, b""
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                at = self._offset
                self._offset, self._last = at + len(line), line
                try:
                    parsed = json.loads(line)
                except ValueError:
                    logger.warning("%s: the line at byte %d is not JSON and is left out", self._path, at)
                else:
                    yield parsed


# locks -------------------------------------------------------------------------------------------------------------
class FileLocked(Exception):
    """The lock has another holder; the message has the file and who that is."""


class FileLock:
    """An exclusive flock on a file, which is created and stays. One holder per file, in this process or another.

    The kernel, or a shared disk's server, releases it when the holder dies. Children that are forked without exec share
    it; started programs do not.

        with FileLock(folder / "lock", "another server is running there", error=QueueError): ...
    """

    def __init__(self, path: Path, cause: str, *, error: type[Exception] = FileLocked, mode: int = 0o666) -> None:
        """Args:
        cause: who else may hold it, for the message ``PATH: CAUSE``.
        error: raised if it is held, with that message as its argument.
        mode: permissions of a new lock file before the umask.
        """
        self.path = path
        self._cause = cause
        self._error = error
        self._mode = mode
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        """True if this object holds the lock."""
        return self._descriptor is not None

    def try_acquire(self) -> bool:
        """Takes the lock if it is free. Raises `OSError` where the file cannot be opened or the disk has no locks."""
        descriptor = self._open()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return True

    def acquire(self) -> None:
        """Takes the lock. Raises the lock's error type at once if it is held, by this process too."""
        if not self.try_acquire():
            raise self._error(f"{self.path}: {self._cause}")

    def wait(self) -> None:
        """Takes the lock; blocks the thread for as long as it is held elsewhere."""
        descriptor = self._open()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    async def acquire_within(self, wait_s: float, on_wait: Callable[[], None] | None = None) -> None:
        """Takes the lock, polling for up to `wait_s` seconds; `on_wait` is called once, before the first pause.

        Raises the lock's error type after that.
        """
        deadline = time.monotonic() + wait_s
        while not self.try_acquire():
            if time.monotonic() >= deadline:
                raise self._error(f"{self.path}: {self._cause}")
            if on_wait is not None:
                on_wait()
                on_wait = None
            await asyncio.sleep(LOCK_POLL_S)

    def release(self) -> None:
        """Releases the lock; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> FileLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _open(self) -> int:
        if self._descriptor is not None:
            raise self._error(f"{self.path}: {self._cause}")
        return os.open(self.path, os.O_RDWR | os.O_CREAT, self._mode)
