"""A system-call filter for boxes, assembled here: a deny list of what code in a box has no business with.

Everything else that could hurt is already out of reach (no capability, own namespaces); this takes away kernel
surface that is often exploited (io_uring, bpf, userfaultfd, keys, namespaces), tracing, and socket families that
network namespaces do not hold, AF_VSOCK (the hypervisor) above all.
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass

_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_AND, _JUMP_ALWAYS = 0x54, 0x05
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARG0 = 0, 4, 16
_NEW_NAMESPACES = 0x7E020000
"""All CLONE_NEW* flags of clone()."""
_X32_BIT = 0x40000000

_CLONE3, _CACHESTAT = 435, 451


_MAP_HUGETLB, _MAP_ANONYMOUS, _MAP_SHARED = 0x40000, 0x20, 0x01
_SOCK_TYPE, _SOCK_DGRAM, _SOCK_RAW = 0xF, 2, 3
_AF_UNIX, _AF_NETLINK = 1, 16
_CLONE_FILES, _CLONE_THREAD = 0x400, 0x10000
_COUNTED_PROTOCOLS = (0, 6, 17)
"""The family's own choice, TCP, UDP: buffers of others (ping, MPTCP, UDP-Lite) are in no figure."""


@dataclass(frozen=True, slots=True)
class _Arch:
    audit: int
    clone: int
    socket: int
    prlimit: int
    mmap: int
    socketpair: int
    fcntl: int
    uncountable: tuple[int, ...]
    """Calls that hold memory where no process and no file shows it."""
    shows_reads: tuple[int, ...]
    """Calls that tell which pages of a shared file are in memory, and who opens it."""
    fadvise: int
    preadv2: int
    denied: tuple[int, ...]


_ARCHES = {
    "x86_64": _Arch(
        0xC000003E,
        clone=56,
        socket=41,
        prlimit=302,
        mmap=9,
        socketpair=53,
        fcntl=72,
        # memfd_create memfd_secret shmget msgget semget vmsplice
        uncountable=(319, 447, 29, 68, 64, 278),
        # inotify_init inotify_init1 mincore
        shows_reads=(253, 294, 27),
        fadvise=221,
        preadv2=327,
        # ptrace syslog pivot_root chroot acct settimeofday mount umount2 swapon swapoff reboot iopl ioperm init_module
        # delete_module quotactl kexec_load add_key request_key keyctl unshare perf_event_open fanotify_init
        # name_to_handle_at open_by_handle_at setns process_vm_readv process_vm_writev kcmp finit_module
        # kexec_file_load bpf userfaultfd
        denied=(
            *(101, 103, 155, 161, 163, 164, 165, 166, 167, 168, 169, 172, 173, 175, 176, 179, 246, 248, 249, 250),
            *(272, 298, 300, 303, 304, 308, 310, 311, 312, 313, 320, 321, 323),
        ),
    ),
    "aarch64": _Arch(
        0xC00000B7,
        clone=220,
        socket=198,
        prlimit=261,
        mmap=222,
        socketpair=199,
        fcntl=25,
        uncountable=(279, 447, 194, 186, 190, 75),
        shows_reads=(26, 232),
        fadvise=223,
        preadv2=286,
        # the same calls by their generic numbers; iopl and ioperm do not exist
        denied=(
            *(117, 116, 41, 51, 89, 170, 40, 39, 224, 225, 142, 105, 106, 60, 104, 217, 218, 219, 97, 241, 262),
            *(264, 265, 268, 270, 271, 272, 273, 294, 280, 282),
        ),
    ),
}


def build_filter(machine: str | None = None, *, countable: bool = False) -> bytes | None:
    """The program as bwrap's ``--seccomp`` reads it; None on an architecture whose numbers are not listed here.

    `countable`: refuses also what would hold memory that `inside.memory` cannot count.
    """
    arch = _ARCHES.get(machine or platform.machine())
    if arch is None:
        return None
    deny = _step(_RETURN, _ERRNO | errno.EPERM)
    program = [_step(_LOAD, _OFFSET_ARCH), _step(_JUMP_EQ, arch.audit, 1, 0), _step(_RETURN, _KILL)]
    program += [_step(_LOAD, _OFFSET_NUMBER), _step(_JUMP_GE, _X32_BIT, 0, 1), deny]
    # its flags lie in memory where a filter cannot look; glibc falls back to clone
    program += [_step(_JUMP_EQ, _CLONE3, 0, 1), _step(_RETURN, _ERRNO | errno.ENOSYS)]
    # io_uring_setup, _enter, _register, open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, pidfd_getfd,
    # mount_setattr: the same numbers on every architecture.
    since_424 = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442)
    for number in (*arch.denied, *arch.shows_reads, _CACHESTAT, *since_424, *(arch.uncountable if countable else ())):
        program += [_step(_JUMP_EQ, number, 0, 1), deny]
    # advice could evict pages that boxes share; it may be ignored, and some programs fail if it is refused
    program += [_step(_JUMP_EQ, arch.fadvise, 0, 1), _step(_RETURN, _ERRNO)]
    # with RWF_NOWAIT it reveals the page cache, which boxes share
    program += _on_call(arch.preadv2, [_step(_LOAD, _argument(5)), _step(_JUMP_EQ, 0, 1, 0), deny])
    if countable:
        program += _on_call(arch.mmap, _shared_memory(deny))
        program += _on_call(arch.fcntl, _open_file_locks(deny))
        program += _on_call(arch.clone, _shared_descriptors(deny))
        program += _on_call(arch.socketpair, _uncounted_sockets(deny))
        program += _on_call(arch.socket, _uncounted_sockets(deny))
    # of others it asks for nothing but their uid: code could starve the box's first process, and we would be blamed
    program += [_step(_JUMP_EQ, arch.prlimit, 0, 4), _step(_LOAD, _OFFSET_ARG0), _step(_JUMP_EQ, 0, 1, 0)]
    program += [deny, _step(_RETURN, _ALLOW)]
    program += [_step(_JUMP_EQ, arch.clone, 0, 4), _step(_LOAD, _OFFSET_ARG0), _step(_JUMP_SET, _NEW_NAMESPACES, 0, 1)]
    program += [deny, _step(_RETURN, _ALLOW)]
    program += [_step(_JUMP_EQ, arch.socket, 1, 0), _step(_RETURN, _ALLOW), _step(_LOAD, _OFFSET_ARG0)]
    for family in (1, 2, 10, 16):  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK: the network namespace bounds them
        program += [_step(_JUMP_EQ, family, 0, 1), _step(_RETURN, _ALLOW)]
    return b"".join([*program, deny])


def _on_call(number: int, steps: list[bytes]) -> list[bytes]:
    """`steps` for the call `number` alone; what they do not decide continues with the number loaded again."""
    return [_step(_JUMP_EQ, number, 0, len(steps) + 1), *steps, _step(_LOAD, _OFFSET_NUMBER)]


def _shared_memory(deny: bytes) -> list[bytes]:
    """Denies mmap() of huge pages and of shared maps without a file; their pages may be in no process at all."""
    return [
        *(_step(_LOAD, _argument(3)), _step(_JUMP_SET, _MAP_HUGETLB, 0, 1), deny),
        *(_step(_JUMP_SET, _MAP_ANONYMOUS, 0, 2), _step(_JUMP_SET, _MAP_SHARED, 0, 1), deny),
    ]


def _open_file_locks(deny: bytes) -> list[bytes]:
    """Denies fcntl() locks that belong to no process."""
    steps = [_step(_LOAD, _argument(1))]
    for command in (37, 38):  # F_OFD_SETLK, F_OFD_SETLKW: no list says whose locks they are
        steps += [_step(_JUMP_EQ, command, 0, 1), deny]
    return steps


def _shared_descriptors(deny: bytes) -> list[bytes]:
    """Denies clone() of another process with the same table of files, which would keep locks of one that has ended."""
    return [
        *(_step(_LOAD, _OFFSET_ARG0), _step(_JUMP_SET, _CLONE_FILES, 0, 2)),
        *(_step(_JUMP_SET, _CLONE_THREAD, 1, 0), deny),
    ]


def _uncounted_sockets(deny: bytes) -> list[bytes]:
    """Return rules for socket() and socketpair(): unix datagrams, which outlive the sender that they are counted with,
    and protocols of the internet families without figures.
    """
    unix = [_step(_LOAD, _argument(1)), _step(_AND, _SOCK_TYPE)]
    unix += [_step(_JUMP_EQ, _SOCK_DGRAM, 1, 0), _step(_JUMP_EQ, _SOCK_RAW, 0, 1), deny]
    internet = [_step(_LOAD, _argument(2))]
    for index, protocol in enumerate(_COUNTED_PROTOCOLS):
        internet.append(_step(_JUMP_EQ, protocol, len(_COUNTED_PROTOCOLS) - index, 0))
    internet.append(deny)
    return [
        *(_step(_LOAD, _OFFSET_ARG0), _step(_JUMP_EQ, _AF_NETLINK, len(unix) + len(internet) + 2, 0)),
        *(_step(_JUMP_EQ, _AF_UNIX, 0, len(unix) + 1), *unix),
        *(_step(_JUMP_ALWAYS, len(internet)), *internet),
    ]


def _argument(index: int) -> int:
    """Offset of the lower half of an argument (both architectures are little-endian)."""
    return _OFFSET_ARG0 + 8 * index


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
