"""Copies of boxes' files, from which further boxes start: the branches of an episode.

A copy has what the box has in /tmp. What ran in the box, the interpreter's names and the shell's variables are not in
it. A box whose file system is its own to write refuses: a copy would lack what was changed outside of /tmp.
"""

from __future__ import annotations

import secrets
import tempfile
from dataclasses import dataclass
from typing import BinaryIO

from penstock.sandbox.protocol import BoxNeeds, Sandbox, SandboxError, SandboxLost, Session, Snapshot
from penstock.sandbox.session import get_folder, put_folder

_OWN_FOLDER = b"./\0"
_HEADER_BYTES = 512


@dataclass(frozen=True, slots=True)
class KeptSnapshot:
    files: BinaryIO
    """A tar of /tmp, in a file without a name: it goes with this process, however that ends."""
    image: str | None
    needs: BoxNeeds


class SnapshotStore:
    """The snapshots of one maker of boxes."""

    def __init__(self) -> None:
        self._kept: dict[str, KeptSnapshot] = {}

    def keep(self, files: bytes, image: str | None, needs: BoxNeeds) -> Snapshot:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `forget`
        file.write(files)
        snapshot = Snapshot(secrets.token_hex(12))
        self._kept[snapshot.snapshot_id] = KeptSnapshot(file, image, needs)
        return snapshot

    def get(self, snapshot: Snapshot) -> KeptSnapshot:
        """Raises `SandboxLost`."""
        if snapshot.snapshot_id not in self._kept:
            raise SandboxLost(f"no snapshot {snapshot.snapshot_id} here: it was forgotten, or another process took it")
        return self._kept[snapshot.snapshot_id]

    def forget(self, snapshot: Snapshot) -> KeptSnapshot | None:
        """None where it is gone already."""
        kept = self._kept.pop(snapshot.snapshot_id, None)
        if kept is not None:
            kept.files.close()
        return kept

    def all(self) -> list[Snapshot]:
        return [Snapshot(snapshot_id) for snapshot_id in self._kept]


async def copy_files(session: Session) -> bytes:
    """A box's /tmp as a tar. Raises `SandboxError`, also where it is longer than a file may be (32 MiB)."""
    try:
        tar = await get_folder(session, ".")
    except OSError as error:
        raise SandboxError(f"the files of session {session.session_id} cannot be copied: {error}") from error
    # without the folder itself, whose mode and owner are the next box's own
    return tar[_HEADER_BYTES:] if tar.startswith(_OWN_FOLDER) else tar


async def fork_from(sandbox: Sandbox, kept: KeptSnapshot, label: str) -> Session:
    """Raises `SandboxError`; no box is left then."""
    session = await sandbox.start(label, image=kept.image, needs=kept.needs)
    try:
        kept.files.seek(0)
        await put_folder(session, ".", kept.files.read())
    except OSError as error:
        await session.close()
        raise SandboxError(f"the files of the snapshot do not fit into a box: {error}") from error
    except BaseException:
        await session.close()
        raise
    return session
