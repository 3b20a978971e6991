"""A repository in a box: scripts run in it, files carried in and out, the snapshot placed.

A snapshot is an archive of the files of one commit, without its history.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import posixpath
import stat
import subprocess
import tarfile
import time
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from penstock.sandbox.protocol import RunResult, Session
from penstock.sandbox.swe import scripts
from penstock.sandbox.swe.task import SweLimits, SweTask, SweTaskError

_KINDS = {"100644": 0o644, "100755": 0o755, "120000": 0o120777}
ArchiveMember = tuple[str, int, int, bytes]
"""path, mode, time of change, content (of a symlink: its target)"""


@lru_cache(maxsize=32)
def snapshot_of(repository: Path, commit: str | None) -> bytes:
    """A gzipped tar. Blobs as git stores them: no attribute, filter or line-ending setting changes a byte.

    A folder is read once per process. Raises `SweTaskError` if it cannot be read.
    """
    if not repository.is_dir():
        raise SweTaskError(
            f"repository {repository} is not a folder; relative ones of rows are below the setting repositories of swe"
        )
    if (repository / ".git").exists() or commit is not None:
        return _pack(_files_of_commit(repository, commit or "HEAD"))
    return _pack(_files_of_folder(repository))


@lru_cache(maxsize=8)
def packages_of(folder: Path) -> bytes:
    """A gzipped tar of a folder of Python packages; times are kept, so its byte code is valid in the box."""
    if not folder.is_dir():
        raise SweTaskError(f"packages {folder} is not a folder")
    return _pack(_files_of_folder(folder))


def _files_of_commit(repository: Path, commit: str) -> Iterator[ArchiveMember]:
    """Submodules are left out: their commits are not in this repository."""
    listing = _git(repository, ["ls-tree", "-r", "-z", "--full-tree", f"{commit}^{{commit}}"])
    files: list[tuple[str, int, str]] = []  # path, mode, id of the blob
    for line in filter(None, listing.split(b"\0")):
        meta, _, name = line.partition(b"\t")
        kind, _, sha = meta.decode().split(" ")
        if kind in _KINDS:
            files.append((os.fsdecode(name), _KINDS[kind], sha))
    blobs = io.BytesIO(_git(repository, ["cat-file", "--batch"], "".join(f"{sha}\n" for _, _, sha in files)))
    for path, mode, _ in files:
        size = int(blobs.readline().split()[2])
        yield path, mode, 946_684_800, blobs.read(size)  # one time for all: the archive is the same bytes each time
        blobs.read(1)


def _files_of_folder(folder: Path) -> Iterator[ArchiveMember]:
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


def _pack(entries: Iterator[ArchiveMember]) -> bytes:
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
        done = subprocess.run(command, input=stdin.encode(), capture_output=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SweTaskError(f"repository {repository}: git cannot be run: {error}") from error
    if done.returncode != 0:
        raise SweTaskError(f"repository {repository}: {done.stderr.decode('utf-8', 'replace').strip()}")
    return done.stdout


PART_BYTES = 4 << 20


class ScriptFailed(Exception):
    """A script of Penstock ended with a status other than 0; the message is its stderr."""


class Workspace:
    """`folder` and `state` are absolute paths in the box of `session`."""

    def __init__(self, session: Session, folder: str, state: str, limits: SweLimits) -> None:
        self.session = session
        self.folder = folder
        self.state = state
        self.limits = limits
        self.used = 0.0
        """Largest share of its time limit that a command used so far; 1 or more where one was reached."""

    @classmethod
    async def find(cls, session: Session, task: SweTask, limits: SweLimits) -> Workspace:
        """Return the workspace of this box; makes its folders. Raises `SweTaskError` if they cannot be made."""
        make = 'mkdir -p "$1" "$2" && cd -- "$2" && pwd -P && cd - >/dev/null && cd -- "$1" && pwd -P'
        argv = ["sh", "-c", make, "swe", ".penstock_swe", task.folder]
        result = await session.run(argv, timeout_s=limits.command_timeout_s)
        if result.exit_code != 0:
            raise SweTaskError(f"folder {task.folder!r} cannot be made in the box: {_end_of(result)}")
        folder, state = result.stdout.splitlines()
        return cls(session, folder, state, limits)

    async def run(self, argv: list[str], timeout_s: float, stdin: str = "") -> RunResult:
        """Raises `SandboxError`."""
        started = time.monotonic()
        result = await self.session.run(argv, stdin=stdin, timeout_s=timeout_s)
        used = (time.monotonic() - started) / timeout_s
        self.used = max(self.used, used, float(result.limit == "wall"))
        return result

    async def script(self, text: str, *arguments: str) -> RunResult:
        """Raises `ScriptFailed`, and `SandboxError`."""
        command = ["sh", "-c", scripts.BEGIN + text, "swe", self.state, self.folder, *arguments]
        result = await self.run(command, self.limits.command_timeout_s)
        if result.exit_code != 0:
            raise ScriptFailed(_end_of(result))
        return result

    async def upload(self, name: str, data: bytes) -> str:
        """The file's path in the box; in parts if it is larger than one call may carry. Raises `SweTaskError`."""
        target = posixpath.join(self.state, name)
        try:
            if len(data) <= PART_BYTES:
                await self.session.write_file(target, data)
            else:
                for number, start in enumerate(range(0, len(data), PART_BYTES)):
                    path = posixpath.join(self.state, f"part.{number:05}")
                    await self.session.write_file(path, data[start : start + PART_BYTES])
                await self.script(scripts.JOIN, name)
        except (OSError, ScriptFailed) as error:
            raise SweTaskError(f"{name}: {len(data)} bytes cannot be written into the box: {error}") from error
        return target

    async def read(self, name: str, max_bytes: int = 16 << 20) -> bytes:
        """Raises `OSError`."""
        return await self.session.read_file(posixpath.join(self.state, name), max_bytes)

    async def place(self, task: SweTask) -> None:
        """The snapshot as one commit without a past or a future, ready to be worked on.

        Raises:
            SweTaskError: the repository cannot be read, or this box cannot hold it.
        """
        try:
            await self.put_packages(task)
            if task.repository is None:
                await self.script(scripts.COPY, task.image_folder)
            else:
                packed = await asyncio.to_thread(snapshot_of, task.repository, task.base_commit)
                await self.script(scripts.UNPACK, await self.upload("snapshot.tgz", packed))
            await self.script(f"{scripts.BASE}\n(\n{scripts.DIFF}\n)")
        except (ScriptFailed, OSError) as error:
            fix = "the box needs git and tar, and room: sandbox.tmp_mb, sandbox.memory_mb"
            if task.repository is None:
                fix = "the image needs git; take history out of it in its Dockerfile: `RUN rm -rf /testbed/.git`"
            text = f"task {task.instance_id}: the repository cannot be placed: {error} ({fix})"
            raise SweTaskError(text) from error
        if await self.read("diff.patch", 1):
            raise SweTaskError(f"task {task.instance_id}: the snapshot differs from its own files")

    async def put_packages(self, task: SweTask) -> None:
        """Restores the packages of this machine, whatever a build changed. Raises `ScriptFailed`, `SweTaskError`."""
        if task.packages is not None:
            packed = await asyncio.to_thread(packages_of, task.packages)
            await self.script(scripts.PACKAGES, await self.upload("packages.tgz", packed))

    def in_folder(self, task: SweTask, command: str, variables: Mapping[str, str] | None = None) -> list[str]:
        """Argument vector of a shell command in the repository. `variables` give way to those of `task`."""
        settings = [f"{name}={value}" for name, value in {**(variables or {}), **self.variables(task)}.items()]
        start = 'cd -- "$1" && eval "$2"'
        shell = 'if command -v bash >/dev/null; then exec bash -c "$0" box "$@"; else exec sh -c "$0" box "$@"; fi'
        return ["env", *settings, "sh", "-c", shell, start, self.folder, command]

    def variables(self, task: SweTask) -> dict[str, str]:
        """Variables that every command of the task sees in addition to the box's own environment."""
        return {"PYTHONPATH": posixpath.join(self.state, "packages")} if task.packages is not None else {}


def _end_of(result: RunResult) -> str:
    output = (result.stderr or result.stdout).strip()[-1000:]
    return output or (f"limit {result.limit}" if result.limit else f"exit status {result.exit_code}")
