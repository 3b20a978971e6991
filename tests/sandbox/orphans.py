"""What boxes leave on a machine, found by whom they belong to: other things may run here at the same time."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.sandbox.containers import engine_leftovers

from penstock.sandbox import UID_BASE as BWRAP_UIDS
from penstock.sandbox.docker.spec import UID_BASE as DOCKER_UIDS

UIDS_PER_MAKER = 1024
MARK = f"penstock-attack-{os.getpid()}"
"""In the name or command line of everything that a test plants on the host or an attack tries to leave there."""
_CGROUPS = Path("/sys/fs/cgroup")
_FOLDERS = ("/dev/shm", "/dev/mqueue", "/var/tmp", tempfile.gettempdir())
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Maker:
    """A process that makes boxes, and the owner name in its cgroups and container labels."""

    pid: int
    owner: str

    def has_uid(self, uid: int) -> bool:
        offsets = (uid - base - self.pid % 16384 * UIDS_PER_MAKER for base in (BWRAP_UIDS, DOCKER_UIDS))
        return any(0 <= offset < UIDS_PER_MAKER for offset in offsets)


MAKERS: list[Maker] = []
"""Every maker of this session; the last fixture to end looks for what any of them left."""


def left_behind(makers: Iterable[Maker]) -> set[str]:
    """Processes, cgroups, containers, mounts, shared memory and files of these makers, in words."""
    makers = list(makers)
    return {
        *(f"process {process}" for process in box_processes(makers) + marked_processes()),
        *(f"process {pid} of a zygote" for pid in zygote_processes(makers)),
        *unreaped_children(),
        *cgroups(makers),
        *engine_leftovers([maker.owner for maker in makers]),
        *_mounts(makers),
        *_shared_memory(makers),
        *_files(makers),
        *_abstract_sockets(),
    }


def wait_until_nothing_new(makers: Iterable[Maker], before: set[str]) -> set[str]:
    """What stays for a while: the kernel and a slow pid 1 take their time with what was killed."""
    makers = list(makers)
    deadline = time.monotonic() + _PATIENCE_S
    left = left_behind(makers) - before
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left &= left_behind(makers)
    return left


def box_processes(makers: Iterable[Maker]) -> list[str]:
    """Living processes, as "pid name", with a uid of these makers' boxes or in one of their cgroups.

    A zombie is none (pid 1 may reap late), but for one that only plays dead: its first thread ended, others go on.
    """
    makers = list(makers)
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = _status(folder)
            ours = _belongs(folder, int(status["Uid"].split()[0]), makers)
            threads = len(list((folder / "task").iterdir()))
        except OSError:
            continue
        if ours and (status["State"][0] not in "ZX" or threads > 1):
            found.append(f"{folder.name} {status['Name']}")
    return found


def _belongs(folder: Path, uid: int, makers: list[Maker]) -> bool:
    groups = (folder / "cgroup").read_text()
    return any(maker.has_uid(uid) or f"/penstock/{maker.owner}/" in groups for maker in makers)


def zygote_processes(makers: Iterable[Maker]) -> list[int]:
    """Living zygotes of these makers, their bubblewraps and the drivers that they forked, by their command lines."""
    wanted = [f'"worker": {maker.pid}'.encode() for maker in makers]
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_bytes()
            if any(re.search(re.escape(words) + rb"\b", line) for words in wanted):
                found.append(int(folder.name))
    return sorted(found)


def marked_processes() -> list[str]:
    """Living processes that carry the mark; any thread of one tells, since the first may have ended."""
    found = set()
    for file in _threads():
        try:
            if MARK.encode() in (file / "cmdline").read_bytes():
                found.add(f"{file.parts[2]} {(file / 'comm').read_text().strip()}")
        except OSError:  # ended meanwhile
            continue
    return sorted(found)


def _threads() -> Iterator[Path]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(
            OSError
        ):  # the process ended meanwhile; a pattern over all of them would end the search
            yield from list((folder / "task").iterdir())


def _status(folder: Path) -> dict[str, str]:
    lines = (folder / "status").read_text(errors="replace").splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def unreaped_children() -> list[str]:
    """Zombies that wait for this very process: its own fault, however slow pid 1 is."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = file.read_text(errors="replace").rpartition(")")
        except OSError:
            continue
        state, parent = rest.split()[:2]
        if state == "Z" and int(parent) == os.getpid():
            found.append(f"zombie {name})")
    return found


def cgroups(makers: Iterable[Maker]) -> list[str]:
    roots = [_CGROUPS, *(path for path in _CGROUPS.glob("*") if path.is_dir())]
    return [
        f"cgroup {path}"
        for root in roots
        for maker in makers
        for path in (root / "penstock" / maker.owner).glob("*")
        if path.is_dir()
    ]


def _mounts(makers: list[Maker]) -> list[str]:
    lines = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    words = ["/newroot", MARK, *(f"/penstock/{maker.owner}/" for maker in makers)]
    return [f"mount {line}" for line in lines if any(word in line for word in words)]


def _shared_memory(makers: list[Maker]) -> Iterator[str]:
    """System V segments, queues and semaphores: they outlive every process that used them."""
    for kind in ("shm", "msg", "sem"):
        file = Path("/proc/sysvipc", kind)
        header, *rows = [line.split() for line in file.read_text().splitlines()] if file.exists() else [[]]
        for row in rows:
            fields = dict(zip(header, row, strict=False))
            if any(maker.has_uid(int(fields["cuid"])) for maker in makers):
                yield f"{kind} {fields['key']}"


def _files(makers: list[Maker]) -> Iterator[str]:
    for folder in (*map(Path, _FOLDERS), Path.cwd(), Path.home(), Path("/")):
        for path in folder.iterdir() if folder.is_dir() else ():
            try:
                uid = path.lstat().st_uid
            except OSError:
                continue
            if _is_unsafe_box_of(path, makers) or MARK in path.name or any(maker.has_uid(uid) for maker in makers):
                yield f"file {path}"


def _is_unsafe_box_of(path: Path, makers: list[Maker]) -> bool:
    """Other tests, and other users of the machine, have theirs at the same time, or were killed over them."""
    return any(path.name.startswith(f"penstock-unsafe-{maker.pid}-") for maker in makers)


def _abstract_sockets() -> list[str]:
    return [f"socket {line}" for line in Path("/proc/net/unix").read_text().splitlines() if f"@{MARK}" in line]
