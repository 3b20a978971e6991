"""What the driver of a container does to itself before anything untrusted runs: a system-call filter of ours."""

from __future__ import annotations

import ctypes

PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
OOM_COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""Of the container's own cgroup, version 2 and 1, as container engines show it inside."""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_char_p)]


def install_filter(program: bytes) -> None:
    """For this process and all that descend from it, on top of the engine's own. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    filled = _Program(len(program) // 8, program)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filled), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "the kernel refuses the system-call filter")


def oom_kills() -> int:
    """Processes of this container that the kernel ended for want of memory; 0 where no counter is to be seen."""
    for path in OOM_COUNTERS:
        try:
            with open(path, encoding="ascii") as file:
                lines = file.read().splitlines()
        except OSError:
            continue
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return 0
