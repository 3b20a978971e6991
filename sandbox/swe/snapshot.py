"""A repository of this machine as one archive: the files of one commit and nothing of its history."""

from __future__ import annotations

import gzip
import io
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from penstock.sandbox.swe.errors import SweTaskError

GIT_DEADLINE_S = 120
MTIME_S = 946_684_800
"""Of every file of a commit: its archive is the same bytes each time."""
_KINDS = {"100644": 0o644, "100755": 0o755, "120000": 0o120777}
Entry = tuple[str, int, int, bytes]
"""path, mode, time of change, content (of a symlink: its target)"""


@lru_cache(maxsize=32)
def snapshot_of(repository: Path, commit: str | None) -> bytes:
    """A gzipped tar. Blobs as git stores them: no attribute, filter or line-ending setting changes a byte.

    A folder is read once per process. Raises `SweTaskError` where it cannot be read.
    """
    if (repository / ".git").exists() or commit is not None:
        return _pack(_files_of_commit(repository, commit or "HEAD"))
    if not repository.is_dir():
        raise SweTaskError(f"repository {repository} is no folder")
    return _pack(_files_of_folder(repository))


@lru_cache(maxsize=8)
def packages_of(folder: Path) -> bytes:
    """A gzipped tar of a folder of Python packages; times are kept, so its byte code is valid in the box."""
    if not folder.is_dir():
        raise SweTaskError(f"packages {folder} is no folder")
    return _pack(_files_of_folder(folder))


def _files_of_commit(repository: Path, commit: str) -> Iterator[Entry]:
    """Submodules are left out: their commits are not in this repository."""
    listing = _git(repository, ["ls-tree", "-r", "-z", "--full-tree", f"{commit}^{{commit}}"])
    found: list[tuple[str, int, str]] = []  # path, mode, id of the blob
    for line in filter(None, listing.split(b"\0")):
        meta, _, name = line.partition(b"\t")
        kind, _, sha = meta.decode().split(" ")
        if kind in _KINDS:
            found.append((os.fsdecode(name), _KINDS[kind], sha))
    blobs = io.BytesIO(_git(repository, ["cat-file", "--batch"], "".join(f"{sha}\n" for _, _, sha in found)))
    for path, mode, _ in found:
        size = int(blobs.readline().split()[2])
        yield path, mode, MTIME_S, blobs.read(size)
        blobs.read(1)


def _files_of_folder(folder: Path) -> Iterator[Entry]:
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != ".git")
        links = [name for name in folders if os.path.islink(os.path.join(where, name))]
        for name in sorted([*names, *links]):
            path = os.path.join(where, name)
            inside, about = os.path.relpath(path, folder), os.lstat(path)
            if stat.S_ISLNK(about.st_mode):
                yield inside, 0o120777, int(about.st_mtime), os.fsencode(os.readlink(path))
            elif stat.S_ISREG(about.st_mode):
                yield inside, 0o755 if about.st_mode & 0o100 else 0o644, int(about.st_mtime), Path(path).read_bytes()


def _pack(entries: Iterator[Entry]) -> bytes:
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0, compresslevel=6) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for entry in entries:
            archive.addfile(*_member(*entry))
    return packed.getvalue()


def _member(path: str, mode: int, mtime_s: int, content: bytes) -> tuple[tarfile.TarInfo, io.BytesIO | None]:
    member = tarfile.TarInfo(path)
    member.mode, member.mtime = mode & 0o777, mtime_s
    if mode & 0o120000 == 0o120000:
        member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(content)
        return member, None
    member.size = len(content)
    return member, io.BytesIO(content)


def _git(repository: Path, arguments: list[str], stdin: str = "") -> bytes:
    command = ["git", "-c", "safe.directory=*", "-C", str(repository), *arguments]
    try:
        done = subprocess.run(command, input=stdin.encode(), capture_output=True, timeout=GIT_DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SweTaskError(f"repository {repository}: git cannot be run: {error}") from error
    if done.returncode != 0:
        raise SweTaskError(f"repository {repository}: {done.stderr.decode('utf-8', 'replace').strip()}")
    return done.stdout
