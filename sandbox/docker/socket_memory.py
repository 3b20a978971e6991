"""Buffers of a container's sockets, which cgroup version 1 counts only where a limit of their own is set.

No current runtime sets it (`KernelMemoryTCP` is accepted and ignored), so it is written here: code could else fill
gigabytes of the host with datagrams that nobody reads, whatever its container's memory is.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup/memory")
_GROUPS = ("docker/{}", "system.slice/docker-{}.scope")
"""Where the engine's two cgroup drivers put a container."""
_FILE = "memory.kmem.tcp.limit_in_bytes"


def limits_socket_memory(cgroup_version: str) -> bool:
    """Whether buffers of sockets count: always in version 2, in version 1 where this process may say so."""
    return cgroup_version != "1" or os.access(ROOT / _FILE, os.W_OK)


def limit_socket_memory(container_id: str, memory_bytes: int) -> bool:
    """Before the container opens its first socket. False where there is no such file, or it is not ours to write."""
    for pattern in _GROUPS:
        try:
            (ROOT / pattern.format(container_id) / _FILE).write_text(str(memory_bytes), encoding="ascii")
        except OSError:
            continue
        return True
    return False
