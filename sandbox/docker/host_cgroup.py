"""A container's memory cgroup as its host has it, where engine and worker share a machine.

Version 1 counts the buffers of sockets only where a limit of their own is set, and no current runtime sets it
(`KernelMemoryTCP` is accepted and ignored), so it is written here: code could else fill gigabytes of the host with
datagrams that nobody reads, whatever its container's memory is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_GROUPS = ("docker/{}", "system.slice/docker-{}.scope")
"""Where the engine's two cgroup drivers put a container."""
_SOCKETS = "memory.kmem.tcp.limit_in_bytes"


def limits_socket_memory(cgroup_version: str) -> bool:
    """Whether buffers of sockets count: always in version 2, in version 1 where this process may say so."""
    return cgroup_version != "1" or os.access(ROOT / "memory" / _SOCKETS, os.W_OK)


def limit_socket_memory(container_id: str, memory_bytes: int) -> bool:
    """Before the container opens its first socket. False where there is no such file, or it is not ours to write."""
    for file in _files(container_id, f"memory/{{}}/{_SOCKETS}"):
        try:
            file.write_text(str(memory_bytes), encoding="ascii")
        except OSError:
            continue
        return True
    return False


def oom_kills(container_id: str) -> int | None:
    """Processes of the container that ended for want of memory, so far; None where this process cannot see it."""
    for file in _files(container_id, "memory/{}/memory.oom_control", "{}/memory.events"):
        try:
            lines = file.read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
    return None


def _files(container_id: str, *patterns: str) -> Iterator[Path]:
    for pattern in patterns:
        yield from (ROOT / pattern.format(group.format(container_id)) for group in _GROUPS)
