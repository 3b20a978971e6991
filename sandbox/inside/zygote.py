"""The zygote of a worker: forks the first process of each box, so that no box starts an interpreter anew.

    worker ──request, descriptors──► zygote ──clone──► driver (pid 1 of the box)
       ◄───────────────────its pidfd───┘

bubblewrap starts the zygote in the file system of a box: read-only root, /usr and /dev. It executes no code of others,
and takes from the worker no more than a uid and descriptors, so a box can inherit nothing of an earlier one. Every box
gets its own namespaces (user, mount, pid, network, ipc, uts, cgroup), its own /proc, /tmp, /dev/shm and /dev/pts,
and the driver drops its capabilities and takes the system-call filter before it answers.

The worker's death ends the zygote (its socket, and the parent's death) and the drivers (each its own socket, and the
zygote's death); with pid 1 the kernel ends the rest of a box.

The zygote waits for its drivers: the kernel then charges what a box has spent to the zygote, and through it to the
worker. Children that a process ignores are charged to none.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

from penstock.sandbox.inside import children, driver

NEW_NAMESPACES = 0x7C020000
"""CLONE_NEW*: mount, uts, ipc, user, pid, network."""
CLONE_NEWCGROUP = 0x02000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND = 2, 4, 8, 4096
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 1, 24, 47, 4
CAPABILITY_VERSION_3 = 0x20080522
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
libc = ctypes.CDLL(None, use_errno=True)
prctl, capset, unshare, mount_one = libc.prctl, libc.capset, libc.unshare, libc.mount
"""Looked up here: a driver that did it itself would copy many pages of the zygote."""
system_call = ctypes.PyDLL(None, use_errno=True).syscall
"""Keeps the interpreter's lock, as a fork must."""
python = ctypes.pythonapi
before_fork, after_fork_in_parent = python.PyOS_BeforeFork, python.PyOS_AfterFork_Parent
after_fork_in_child = python.PyOS_AfterFork_Child


class Zygote:
    """One loop: receive, fork, answer; reap. A driver is reaped between two requests alone: until `fork` has returned,
    its process id is its own."""

    def __init__(self, settings: dict[str, Any], requests: socket.socket) -> None:
        """`settings`: of every box."""
        self.settings = settings
        self.filter = driver.filter_of(settings)
        self.requests = requests
        self.clone_number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
        with open("/proc/sys/kernel/cap_last_cap", encoding="ascii") as file:
            self.capabilities = int(file.read()) + 1
            """Number of capabilities that the kernel knows."""
        self.wakeup = children.readable_when_a_child_ends()

    def serve(self) -> None:
        """Until the worker is gone."""
        poller = select.poll()
        for fd in (self.requests.fileno(), self.wakeup):
            poller.register(fd, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poller.poll()]
            if self.wakeup in ready:
                reap(self.wakeup)
            if self.requests.fileno() in ready:
                request = receive(self.requests)
                if request is None:
                    return reap(self.wakeup)
                self.answer(*request)

    def answer(self, settings: dict[str, Any], descriptors: list[int]) -> None:
        """Closes `descriptors`."""
        try:
            answer, sent = b"forked", [self.fork(settings["uid"], descriptors)]
        except OSError as error:
            answer, sent = str(error).encode("utf-8", "replace"), []
        for fd in descriptors:
            os.close(fd)
        socket.send_fds(self.requests, [answer], sent)
        for fd in sent:
            os.close(fd)

    def fork(self, uid: int | None, descriptors: list[int]) -> int:
        """A pidfd of the driver. Raises `OSError`.

        `descriptors`: control socket, stderr, and the file to enter each group by; `uid`: one of the machine that no
        other box has, or None if this is not root and has no other to give.
        """
        mapped = os.pipe()
        try:
            pid = clone(self.clone_number, NEW_NAMESPACES)
            if pid == 0:
                self.become_box(mapped, descriptors)
            pidfd = os.pidfd_open(pid)
            try:
                map_ids(pid, self.settings["uid"], *((uid, uid) if uid is not None else (os.geteuid(), os.getegid())))
                os.write(mapped[1], b"m")
            except OSError:
                os.close(pidfd)
                raise
        finally:
            for fd in mapped:
                os.close(fd)  # the driver ends where nothing was written
        return pidfd

    def become_box(self, mapped: tuple[int, int], descriptors: list[int]) -> NoReturn:
        try:
            forget_children()
            os.close(mapped[1])
            ready = os.read(mapped[0], 1)
            if ready:
                take_stdio(descriptors[0], descriptors[1], descriptors[2:])
                check(unshare(CLONE_NEWCGROUP), "unshare(CLONE_NEWCGROUP)")
                own = self.settings["uid"]
                os.setresgid(own, own, own)
                os.setresuid(own, own, own)
                die_with_parent()  # after the change of uid, which clears it
                furnish(self.settings)
                drop_capabilities(self.capabilities)
                driver.serve(self.settings, self.filter)
        except BaseException as error:  # noqa: BLE001 - its last words; it must never return into the zygote's loop
            os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
        finally:
            os._exit(1)


def main() -> None:
    """Argument 1: the settings of every box; argument 3: the socket of requests. Ends when the worker does."""
    children.set_handler(children.INTERRUPT, children.IGNORE)
    if os.geteuid() == 0:
        os.setgroups([])  # a box may not change them any more
    zygote = Zygote(json.loads(sys.argv[1]), socket.socket(fileno=int(sys.argv[3])))
    gc.collect()
    gc.freeze()
    zygote.serve()


def forget_children() -> None:
    """Forget the children in a fork: the pipe that its signals would write to is the zygote's."""
    signal.set_wakeup_fd(-1)
    children.set_handler(children.CHILD_ENDED, children.DEFAULT)


def reap(wakeup: int) -> None:
    """All that have ended. The pipe is emptied first: what ends from here on writes to it again."""
    with contextlib.suppress(BlockingIOError):
        os.read(wakeup, 4096)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue


def receive(requests: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """None where the worker is gone."""
    data, descriptors, _, _ = socket.recv_fds(requests, 4096, 8)
    return (json.loads(data), descriptors) if data else None


def clone(number: int, namespaces: int) -> int:
    """Forks as `os.fork`, into new namespaces: 0 in the child, which is pid 1 there. Raises `OSError`."""
    flags = ctypes.c_ulong(namespaces | children.CHILD_ENDED)
    before_fork()
    pid: int = system_call(number, flags, 0, 0, 0, 0)
    if pid == 0:
        after_fork_in_child()
        return 0
    after_fork_in_parent()
    check(pid < 0, "clone")
    return pid


def map_ids(pid: int, own: int, uid: int, gid: int) -> None:
    """Maps one user and one group into the namespace of `pid`; both have the number `own` there."""
    for file, text in (("setgroups", "deny"), ("gid_map", f"{own} {gid} 1"), ("uid_map", f"{own} {uid} 1")):
        write_text(f"/proc/{pid}/{file}", text)


def take_stdio(control: int, stderr: int, groups: list[int]) -> None:
    """Enters the groups, each by its file; afterwards 0 is the control socket and 2 stderr, 1 is null."""
    for group in groups:
        os.write(group, b"0")
    null = os.open(os.devnull, os.O_RDWR)
    for number, fd in enumerate((control, null, stderr)):
        os.dup2(fd, number)
    os.closerange(3, 1024)


def die_with_parent() -> None:
    check(prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def furnish(settings: dict[str, Any]) -> None:
    """Mounts and sets what boxes must not share: writable file systems, the loopback, host name and session."""
    os.setsid()
    quiet = MS_NOSUID | MS_NODEV
    mount("proc", "/proc", quiet | MS_NOEXEC, "")
    mount("tmpfs", "/dev/shm", quiet, f"mode=0755,size={settings['shm_bytes']}")  # noqa: S108 - the box's own
    mount("tmpfs", "/tmp", quiet, f"mode=0755,size={settings['tmp_bytes']}")  # noqa: S108 - the box's own
    for folder in settings["own_folders"]:  # on the box's /tmp, so that one size and one count holds for all of them
        os.mkdir("/tmp" + folder, 0o755)  # noqa: S108 - the box's own
        bind("/tmp" + folder, folder)  # noqa: S108 - the box's own
    mount("devpts", "/dev/pts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    socket.sethostname("sandbox")
    # none below this one; to raise it again takes a capability in it
    write_text("/proc/sys/user/max_user_namespaces", "0")
    os.chdir("/tmp")  # noqa: S108 - the box's own


def drop_capabilities(count: int) -> None:
    """All of them, for this process and everything that it will execute."""
    for capability in range(count):
        check(prctl(PR_CAPBSET_DROP, capability, 0, 0, 0), "prctl(PR_CAPBSET_DROP)")
    check(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "prctl(PR_CAP_AMBIENT)")
    check(capset(struct.pack("=Ii", CAPABILITY_VERSION_3, 0), bytes(24)), "capset")
    check(prctl(driver.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def mount(kind: str, target: str, flags: int, options: str) -> None:
    failed = mount_one(kind.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    check(failed, f"mount {kind} on {target}")


def bind(source: str, target: str) -> None:
    failed = mount_one(source.encode(), target.encode(), None, ctypes.c_ulong(MS_BIND), None)
    check(failed, f"bind {source} to {target}")


def check(failed: bool | int, what: str) -> None:
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def write_text(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode("ascii"))
    finally:
        os.close(fd)
