"""Memory of a box that no cgroup limits, counted by its first process: what its processes, files and sockets hold.

    processes   anonymous pages and swap; a page that several share counts once
    files       used blocks of the box's tmpfs folders (deleted files that are still open too), and their inodes
    sockets     buffers of all sockets in the box's network namespace, as the kernel's socket diagnosis gives them
    terminals   a fixed amount each
    file locks  no more than `MOST_LOCKS` of them

Nothing else in a box can hold pages: the filter of such boxes (`seccomp.build_filter(countable=True)`) refuses locks
of open files, which are no process's, files without a name, System V objects, shared anonymous maps, huge pages,
vmsplice and sockets that no figure shows, and /dev/zero cannot be mapped there. Pipes are bounded by the kernel per
user (``fs.pipe-user-pages-soft``).

Between two looks a box can grow as fast as it can write, up to its limit per process (RLIMIT_AS) times its processes.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time
from collections.abc import Iterator

LOOK_S = (0.01, 0.1)
"""Shortest and longest pause between two looks while code runs."""
IDLE_LOOK_S = 0.25
"""Pause between two looks while no call runs: a daemon may still fill the box."""
MOST_LOCKS = 1 << 14
"""File locks of a box, some 4 MB of the kernel's memory. No program needs as many; a longer list is slow to read."""
LOCKS_LOOK_S = 2.0
"""Pause between two looks at them, and before the first: a look stops the machine's file locks for a moment."""
PROGRAM_BYTES = 8 << 20
"""Enough for a small program and for the driver's child that executes it."""
FOLDERS = ("/tmp", "/dev/shm")  # noqa: S108 - the box's own
TERMINALS = "/dev/pts"


class UncountableMemory(Exception):
    """The memory of a box cannot be counted here; the message names what is missing and how to have it."""


class MemoryWatch:
    """Watches the memory of the box whose first process this is."""

    def __init__(self, limit_bytes: int, send_bytes: int) -> None:
        """`send_bytes`: the most that one socket may have on its way."""
        self.limit_bytes = limit_bytes
        self.send_bytes = send_bytes
        self.pause_s = LOOK_S[0]
        """Until the next look."""
        self._locks_due_s = time.monotonic() + LOCKS_LOOK_S

    def exceeded(self) -> bool:
        """True if the box holds more than its limit. Cheap while it does not."""
        rest = self._without_processes()
        rough = rest + sum(process.anonymous for process in processes())
        if rough > self.limit_bytes:
            # Twice: processes are read one after the other, and one that executes a program meanwhile may count double.
            rough = rest + min(processes_bytes(), processes_bytes())
        free = self.limit_bytes - rough
        if time.monotonic() >= self._locks_due_s:  # many processes at once take some 10 MB of locks in that time
            self._locks_due_s = time.monotonic() + LOCKS_LOOK_S
            free = -1 if has_many_locks() else free
        # A box may fill the rest of its memory at 4 GiB/s: the next look comes no later than that.
        self.pause_s = min(max(free / (4 << 30), LOOK_S[0]), LOOK_S[1])
        return free < 0

    def full(self) -> bool:
        """Return True if files and sockets leave no room for a program (`PROGRAM_BYTES`, at most an eighth of the
        limit): not even one that deletes a file could run.
        """
        own = _read_process(os.getpid())
        stays = self._without_processes() + (own.anonymous if own is not None else 0)
        return stays > self.limit_bytes - min(PROGRAM_BYTES, self.limit_bytes // 8)

    def _without_processes(self) -> int:
        files = sum(map(_folder_bytes, FOLDERS)) + len(os.listdir(TERMINALS)) * (128 << 10)
        return files + sum(socket_bytes(self.send_bytes))


def has_many_locks() -> bool:
    """True if processes of this pid namespace hold more than `MOST_LOCKS`; locks of open files are the machine's."""
    try:
        with open("/proc/locks", "rb") as file:
            ours = (line for line in file if b"OFDLCK" not in line)
            return next(itertools.islice(ours, MOST_LOCKS, None), None) is not None
    except FileNotFoundError:  # a kernel without file locks
        return False


def require_countable() -> None:
    """Raises `UncountableMemory`. Every source is read once."""
    try:
        with socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
            datagrams.bind(("127.0.0.1", 0))
            sum(socket_bytes(0))
        used = processes_bytes() + sum(map(_folder_bytes, FOLDERS))
        os.listdir(TERMINALS)
    except OSError as error:
        raise UncountableMemory(f"{error} (socket diagnosis: `modprobe -a unix_diag tcp_diag udp_diag`)") from error
    if used == 0:
        raise UncountableMemory("/proc/PID/smaps_rollup says nothing of anonymous pages (Linux 5.4 or newer does)")
    if not _read_int("/proc/sys/fs/pipe-user-pages-soft") and not _read_int("/proc/sys/fs/pipe-user-pages-hard"):
        raise UncountableMemory("pipes are not limited (`sysctl -w fs.pipe-user-pages-soft=16384`)")


def _read_int(path: str) -> int:
    with open(path, encoding="ascii") as file:
        return int(file.read())


def _folder_bytes(folder: str) -> int:
    status = os.statvfs(folder)
    inode_bytes = 1024  # an empty file of a tmpfs: inode, directory entry, name
    return (status.f_blocks - status.f_bfree) * status.f_frsize + (status.f_files - status.f_ffree) * inode_bytes


# ---- processes


class ProcessMemory:
    """The memory of one process, from /proc/PID/status."""

    def __init__(self, pid: int, thread: int, parent: int, anonymous: int) -> None:
        self.pid = pid
        self.thread = thread
        """One that lives: of a process whose first thread ended, /proc/PID shows no memory."""
        self.parent = parent
        self.anonymous = anonymous
        """Bytes of anonymous pages and swap; pages that others share are in it."""


def processes() -> Iterator[ProcessMemory]:
    """Yields the processes of this pid namespace that have memory of their own."""
    for name in os.listdir("/proc"):
        if name.isdigit() and (memory := _read_process(int(name))) is not None:
            yield memory


def _read_process(pid: int) -> ProcessMemory | None:
    """None if it is exiting."""
    thread, fields = pid, _read_status(str(pid))
    if b"RssAnon" not in fields and int(fields.get(b"Threads", b"0")) > 1:  # its first thread ended, others run
        tasks = ((int(name), _read_status(f"{pid}/task/{name}")) for name in _threads(pid))
        thread, fields = next((task for task in tasks if b"RssAnon" in task[1]), (pid, {}))
    if b"RssAnon" not in fields:
        return None
    kilobytes = sum(int(fields[name].split()[0]) for name in (b"RssAnon", b"VmSwap") if name in fields)
    return ProcessMemory(pid, thread, int(fields[b"PPid"]), kilobytes << 10)


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return []


def _read_status(task: str) -> dict[bytes, bytes]:
    """Nothing if it is gone."""
    try:
        with open(f"/proc/{task}/status", "rb") as file:
            return dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
    except (FileNotFoundError, ProcessLookupError):
        return {}


def processes_bytes() -> int:
    """Anonymous pages and swap of all processes, shared ones once."""
    living = list(processes())
    borrowers = _borrowers(living)
    return sum(_proportional(process) for process in living if process.pid not in borrowers)


def _proportional(process: ProcessMemory) -> int:
    """One that cannot be read (its program may not be read either) counts with all that it shares.

    As it is now: since it was found, a child of a vfork() may have executed its program, or be gone.
    """
    try:
        with open(f"/proc/{process.pid}/task/{process.thread}/smaps_rollup", "rb") as file:
            lines = [line.split() for line in file.read().splitlines()[1:]]
    except (PermissionError, FileNotFoundError, ProcessLookupError):
        now = _read_process(process.pid)
        return now.anonymous if now is not None else 0
    return sum(int(fields[1]) for fields in lines if fields[0] in (b"Pss_Anon:", b"SwapPss:")) << 10


def _borrowers(living: list[ProcessMemory]) -> set[int]:
    """Children of a vfork() that did not execute a program yet: they run in their parent's memory, not next to it.

    Their parent waits uninterruptibly meanwhile. One child per waiting parent, the one most like it: code that forks
    another in the same size gains nothing, since then that one or the borrower is counted.
    """
    by_pid = {process.pid: process for process in living}
    children: dict[int, list[ProcessMemory]] = {}
    for process in living:
        if process.parent in by_pid:
            children.setdefault(process.parent, []).append(process)
    return {
        min(several, key=lambda child: abs(child.anonymous - by_pid[parent].anonymous)).pid
        for parent, several in children.items()
        if any(
            _read_status(f"{parent}/task/{name}").get(b"State", b"").split()[:1] == [b"D"] for name in _threads(parent)
        )
    }


# ---- sockets

_NETLINK_SOCK_DIAG = 4
_BY_FAMILY, _DUMP_REQUEST = 20, 0x301
_DONE, _ERROR = 3, 2
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_MEMINFO = struct.Struct("=9I")
_UNIX_PEER, _UNIX_MEMINFO, _INET_MEMINFO = 2, 5, 7
_SHOW_PEER, _SHOW_MEMINFO = 0x04, 0x20
_UNIX_MESSAGE, _INET_MESSAGE = 16, 72
_ALL_STATES = 0xFFFFFFFF


def socket_bytes(send_bytes: int) -> Iterator[int]:
    """Buffers of each socket in this network namespace. Raises `OSError` where the kernel cannot tell.

    What a unix socket was sent is counted with its sender; if that is closed, `send_bytes` stand for it.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as diagnosis:
        diagnosis.settimeout(1.0)
        show = _SHOW_PEER | _SHOW_MEMINFO
        unix = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, _ALL_STATES, 0, show, 0, 0)
        for attributes in _ask(diagnosis, unix, _UNIX_MESSAGE):
            yield _buffer_bytes(attributes.get(_UNIX_MEMINFO))
            if _UNIX_PEER in attributes and attributes[_UNIX_PEER] == bytes(4):
                yield send_bytes
        for family, protocol in _in_use():
            inet = struct.pack("=BBBBI48x", family, protocol, 1 << (_INET_MEMINFO - 1), 0, _ALL_STATES)
            for attributes in _ask(diagnosis, inet, _INET_MESSAGE):
                yield _buffer_bytes(attributes.get(_INET_MEMINFO))
    for fields in map(str.split, _lines("/proc/net/netlink")[1:]):
        yield int(fields[4]) + int(fields[5])


def _in_use() -> Iterator[tuple[int, int]]:
    """Family and protocol of the internet sockets that there are: asking for each takes milliseconds, the kernel looks
    through the tables of the whole machine."""
    protocols = {"TCP": socket.IPPROTO_TCP, "UDP": socket.IPPROTO_UDP}
    for file, family in (("sockstat", socket.AF_INET), ("sockstat6", socket.AF_INET6)):
        for name, _, count, *_ in map(str.split, _lines(f"/proc/net/{file}")):
            protocol = protocols.get(name.rstrip("6:"))
            if protocol is not None and count != "0":
                yield family, protocol


def _ask(diagnosis: socket.socket, request: bytes, message_bytes: int) -> Iterator[dict[int, bytes]]:
    """Each socket's attributes."""
    diagnosis.send(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _DUMP_REQUEST, 1, 0) + request)
    while True:
        data = diagnosis.recv(1 << 18)
        while len(data) >= _HEADER.size:
            size, kind, *_ = _HEADER.unpack_from(data)
            if kind == _ERROR:
                code = -struct.unpack_from("=i", data, _HEADER.size)[0]
                raise OSError(code, f"socket diagnosis: {os.strerror(code)}")
            if kind == _DONE:
                return
            yield _attributes(data[_HEADER.size + message_bytes : size])
            data = data[size + 3 & ~3 :]


def _attributes(data: bytes) -> dict[int, bytes]:
    attributes = {}
    while len(data) >= _ATTRIBUTE.size:
        size, kind = _ATTRIBUTE.unpack_from(data)
        attributes[kind] = data[_ATTRIBUTE.size : size]
        data = data[max(size + 3 & ~3, _ATTRIBUTE.size) :]
    return attributes


def _buffer_bytes(meminfo: bytes | None) -> int:
    figures = _MEMINFO.unpack_from(meminfo) if meminfo else (0,) * 9
    # of a socket's memory figures: bytes to read, to send, reserved ahead, in the backlog
    return sum(figures[index] for index in (0, 2, 4, 7))


def _lines(path: str) -> list[str]:
    """Nothing if the file is missing: a kernel without version 6 has no figures of it."""
    try:
        with open(path, encoding="ascii") as file:
            return file.read().splitlines()
    except FileNotFoundError:
        return []
