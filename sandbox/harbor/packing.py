"""Folders as archives: the files that go into a box, and the context that an image is built from."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = "penstock-harbor"
"""Repository of the images that are built from Dockerfiles of tasks."""


@dataclass(frozen=True, slots=True)
class BuildContext:
    """The input of an image's build."""

    folder: Path
    dockerfile: str
    """Text of the Dockerfile, which may have more than the folder's file."""
    left_out: frozenset[str] = frozenset()
    """Names right in `folder` that are no part of it."""

    def packed(self) -> bytes:
        """A tar with the Dockerfile in it. Raises `OSError`."""
        return packed(self.folder, {"Dockerfile": self.dockerfile.encode()}, self.left_out)

    def image_name(self, task: str) -> str:
        """Says what is in it: another Dockerfile or context is another image."""
        digest = hashlib.sha256()
        for name, mode, content in _entries(self.folder, {"Dockerfile": self.dockerfile.encode()}, self.left_out):
            digest.update(f"{len(name)} {name} {mode:o} {len(content)} ".encode() + content)
        plain = re.sub(r"[^a-z0-9]+", "-", task.lower()).strip("-") or "task"
        return f"{REPOSITORY}/{plain[:80]}:{digest.hexdigest()[:16]}"


def packed(folder: Path | None, more: Mapping[str, bytes] | None = None, left_out: Iterable[str] = ()) -> bytes:
    """A tar of the folder's files and of `more` (by path, scripts executable); always the same for the same files.

    Raises `OSError`.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, mode, content in _entries(folder, more or {}, frozenset(left_out)):
            member = tarfile.TarInfo(name)
            member.mode = mode & 0o777
            if mode & _LINK:
                member.type, member.linkname = tarfile.SYMTYPE, content.decode("utf-8", "surrogateescape")
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


_LINK = 0o120000
MAX_PACKED_BYTES = 256 << 20
"""Limit of one folder's files, which are held in memory."""


def _entries(
    folder: Path | None, more: Mapping[str, bytes], left_out: frozenset[str]
) -> Iterator[tuple[str, int, bytes]]:
    """(path, mode, content, of a link its target), by path. Raises `OSError`, also where `folder` is a link: a task of
    others may not bring a folder of this machine into its box; and where its files are more than `MAX_PACKED_BYTES`."""
    if folder is not None and folder.is_symlink():
        raise OSError(f"{folder} is a link; a task's folders stand in the task")
    room = MAX_PACKED_BYTES
    entries = {name: (0o755 if name.endswith(".sh") else 0o644, content) for name, content in more.items()}
    for path in sorted(folder.rglob("*")) if folder is not None else ():
        name = str(path.relative_to(folder)) if folder is not None else ""
        if name in more or name.split("/")[0] in left_out:
            continue
        if path.is_symlink():
            entries[name] = (_LINK | 0o777, str(path.readlink()).encode("utf-8", "surrogateescape"))
        elif path.is_file():
            room -= path.stat().st_size
            if room < 0:
                raise OSError(f"{folder} has more than {MAX_PACKED_BYTES >> 20} MB of files")
            entries[name] = (0o755 if path.stat().st_mode & 0o100 else 0o644, path.read_bytes())
    for name, (mode, content) in sorted(entries.items()):
        yield name, mode, content
