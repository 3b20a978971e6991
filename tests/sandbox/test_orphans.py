"""The check at the end of the session sees what it is there for: each kind is left behind once, on purpose."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.sandbox.containers import IMAGE, docker
from tests.sandbox.orphans import MARK, Maker, left_behind, wait_until_nothing_new

from penstock.sandbox import UID_BASE

MAKER = Maker(os.getpid(), f"leaver-{os.getpid()}")
UID = UID_BASE + os.getpid() % 16384 * 1024 + 1000
GHOST = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).syscall(60, 0)
"""


@contextlib.contextmanager
def process(*argv: str, uid: int | None = None) -> Iterator[None]:
    started = subprocess.Popen(argv, user=uid)
    time.sleep(0.2)  # a ghost needs a moment to become one
    try:
        yield
    finally:
        started.kill()
        started.wait(timeout=60)


@contextlib.contextmanager
def zombie() -> Iterator[None]:
    started = subprocess.Popen(["true"])
    os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)
    yield
    started.wait(timeout=60)


@contextlib.contextmanager
def file(folder: str) -> Iterator[None]:
    path = Path(folder, f"{MARK}-left")
    path.touch()
    yield
    path.unlink()


@contextlib.contextmanager
def abstract_socket() -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"\0{MARK}-left")
        yield


@contextlib.contextmanager
def cgroup() -> Iterator[None]:
    groups = Path("/sys/fs/cgroup")
    path = next((groups / name for name in ("pids", ".") if (groups / name / "cgroup.procs").exists()), groups)
    path = path / "penstock" / MAKER.owner / "left"
    path.mkdir(parents=True)
    yield
    path.rmdir()
    path.parent.rmdir()


ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root may do this")
LEFT: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "process by mark": lambda: process("sh", "-c", "sleep 600; true", MARK),
    "process that looks dead": lambda: process(sys.executable, "-c", GHOST, MARK),
    "zombie": zombie,
    f"file {tempfile.gettempdir()}": lambda: file(tempfile.gettempdir()),
    "file /dev/shm": lambda: file("/dev/shm"),
    "socket": abstract_socket,
    "process by uid": lambda: process("/usr/bin/sleep", "600", uid=UID),
    "cgroup": cgroup,
}
PARAMETERS = [pytest.param(what, marks=ROOT_ONLY if what in ("process by uid", "cgroup") else ()) for what in LEFT]


@pytest.mark.parametrize("what", PARAMETERS)
def test_orphans_what_is_left_is_seen_while_it_is_there(what: str) -> None:
    before = left_behind([MAKER])
    kind = what if what.startswith("file") else what.split(maxsplit=1)[0]
    with LEFT[what]():
        assert [seen for seen in left_behind([MAKER]) - before if seen.startswith(kind)]
    assert not wait_until_nothing_new([MAKER], before)


@pytest.mark.docker
def test_orphans_see_containers_and_volumes() -> None:
    before = left_behind([MAKER])
    made = docker("create", "--label", f"penstock.owner={MAKER.owner}", IMAGE, "true")
    assert [what for what in left_behind([MAKER]) - before if what.startswith("container")]
    docker("rm", made)
    volume = docker("volume", "create")
    assert f"volume {volume}" in left_behind([MAKER]) - before
    docker("volume", "rm", volume)
    assert not wait_until_nothing_new([MAKER], before)
