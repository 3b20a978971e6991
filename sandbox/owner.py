"""The process that holds a box. Its identity is in the names and labels of all that may outlive it: a later start
removes what belongs to dead processes, and nothing of a living one."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path


def this_process() -> str:
    """This process as ``pid-start``, which no later process with the same pid has."""
    return f"{os.getpid()}-{process_start(os.getpid())}"


def is_gone(process: str) -> bool:
    """True if the process of this machine that `this_process` named has ended. Text behind the name is ignored."""
    pid, _, rest = process.partition("-")
    return not pid.isdigit() or process_start(int(pid)) != rest.partition("-")[0]


def process_start(pid: int) -> str:
    """Start time of a living process in clock ticks after boot; empty if it has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def machine() -> str:
    """Names this boot and process namespace, in which a pid means one process. Sixteen characters.

    Clones of a machine's snapshot have one boot id: host name and addresses of network devices tell them apart.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    parts = [boot, str(os.stat("/proc/self/ns/pid").st_ino), socket.gethostname(), *network_addresses()]
    return hashlib.blake2b("/".join(parts).encode(), digest_size=8).hexdigest()


def network_addresses() -> list[str]:
    """Return the hardware addresses of this machine's network devices; those of containers come and go, and have no
    device behind them."""
    files = sorted(Path("/sys/class/net").glob("*/address"))
    return [file.read_text(encoding="ascii").strip() for file in files if (file.parent / "device").exists()]
