"""Copies of boxes, from which further boxes start: the branches of an episode.

    a box that can write folders alone       each of them as a tar
    a box with its own root                 an image of its file system, made by who runs it, and a tar of each folder
                                             that is next to it in memory

What ran in the box, the interpreter's names and the shell's variables are in no copy.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

from penstock.sandbox.protocol import BoxNeeds, Sandbox, SandboxBusy, SandboxError, SandboxLost, Session, Snapshot
from penstock.sandbox.session import get_folder, put_folder

TMP = "."
"""A box's /tmp: paths of sessions are relative to it."""


@dataclass(frozen=True, slots=True)
class FolderCopy:
    path: str
    files: BinaryIO
    """A tar, in a file without a name: it goes with this process, however that ends."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class BoxCopy:
    """The parts of a fork: a box of `image` and `needs`, with these folders put into it."""

    folders: tuple[FolderCopy, ...]
    image: str | None
    needs: BoxNeeds
    image_bytes: int = 0
    """Bytes of `image` beyond the image that the box was started from, if known here."""

    @property
    def size_bytes(self) -> int:
        return self.image_bytes + sum(folder.size_bytes for folder in self.folders)

    def close(self) -> None:
        for folder in self.folders:
            folder.files.close()


class SnapshotStore:
    """The snapshots of one maker of boxes, at most `most_mb` together."""

    def __init__(self, most_mb: int) -> None:
        self._most_mb = most_mb
        self._copies: dict[str, BoxCopy] = {}

    def require_room(self, size_bytes: int) -> None:
        """Raises `SandboxBusy` where a copy of that size is too much now."""
        used_bytes = sum(copy.size_bytes for copy in self._copies.values())
        if used_bytes + size_bytes > self._most_mb << 20:
            raise SandboxBusy(
                f"sandbox.snapshot_mb: snapshots of this process hold {used_bytes / 2**20:.1f} MiB of {self._most_mb},"
                f" and another one needs {size_bytes / 2**20:.1f}: forget some, or raise it"
            )

    def keep(self, copy: BoxCopy) -> Snapshot:
        """Raises `SandboxBusy`: the copy is its caller's then."""
        self.require_room(copy.size_bytes)
        snapshot = Snapshot(secrets.token_hex(12))
        self._copies[snapshot.snapshot_id] = copy
        return snapshot

    def get(self, snapshot: Snapshot) -> BoxCopy:
        """Raises `SandboxLost`."""
        if snapshot.snapshot_id not in self._copies:
            raise SandboxLost(f"no snapshot {snapshot.snapshot_id} here: it was forgotten, or another process took it")
        return self._copies[snapshot.snapshot_id]

    def forget(self, snapshot: Snapshot) -> BoxCopy | None:
        """The copy, which is its caller's now; None if it is gone already."""
        return self._copies.pop(snapshot.snapshot_id, None)

    def all(self) -> list[Snapshot]:
        return [Snapshot(snapshot_id) for snapshot_id in self._copies]


async def copy_folders(session: Session, paths: Sequence[str], *, themselves: bool = False) -> tuple[FolderCopy, ...]:
    """`themselves`: with mode and owner of the folders, which are else the next box's own.

    Raises `SandboxError`, also where a folder's tar is longer than a file may be (32 MiB).
    """
    copies: list[FolderCopy] = []
    with contextlib.ExitStack() as opened:
        for path in paths:
            try:
                tar = await get_folder(session, path)
                if not themselves and tar.startswith(b"./\0"):
                    tar = tar[512:]  # without the first header
                file = opened.enter_context(tempfile.TemporaryFile())
                file.write(tar)
            except OSError as error:
                text = f"the files of session {session.session_id} cannot be copied: {error}"
                raise SandboxError(text) from error
            copies.append(FolderCopy(path, file, len(tar)))
        opened.pop_all()  # they are closed with their copy
    return tuple(copies)


async def fork_from(sandbox: Sandbox, copy: BoxCopy, label: str) -> Session:
    """Raises `SandboxError`; no box is left then."""
    session = await sandbox.start(label, image=copy.image, needs=copy.needs)
    try:
        for folder in copy.folders:
            if folder.files.closed:
                raise SandboxLost("the snapshot was forgotten while its fork started")
            folder.files.seek(0)
            await put_folder(session, folder.path, folder.files.read())
    except BaseException as error:
        await session.close()
        if isinstance(error, OSError):
            raise SandboxError(f"the files of the snapshot do not fit into a box: {error}") from error
        raise
    return session
