"""Whose container it is, as labels, and clearing away what a killed process left.

A box ends by itself when its worker dies, and the engine removes it then. What can stay is a container whose worker was
killed between its creation and its start, or that the engine lost while it was down itself.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.sandbox.cgroups import process_start
from penstock.sandbox.docker.container import remove
from penstock.sandbox.docker.engine import calling

if TYPE_CHECKING:
    from aiodocker import Docker

PREFIX = "penstock."
ABANDONED_AFTER_S = 600.0
"""Another machine's process cannot be looked at: its container is abandoned when it does not run at this age."""


def labels_of(owner: str, label: str, session_id: str) -> dict[str, str]:
    facts = {
        "owner": owner,
        "label": label[:256],
        "session": session_id,
        "machine": _machine(),
        "process": f"{os.getpid()}-{process_start(os.getpid())}",
    }
    return {PREFIX + name: value for name, value in facts.items()}


async def clear_away(client: Docker, owner: str) -> int:
    """Removes the containers of `owner` whose process is gone; returns how many. Raises `SandboxError`."""
    async with calling("looking for containers that a killed process left"):
        found = await client.containers.list(all=True, filters={"label": [f"{PREFIX}owner={owner}"]})
    left = [container for container in found if is_abandoned(container._container, time.time())]
    for container in left:
        await remove(client, container.id)
    return len(left)


def is_abandoned(listed: dict[str, Any], now: float) -> bool:
    """`listed`: the engine's entry of a container (State, Created in seconds, Labels)."""
    labels = listed.get("Labels") or {}
    if labels.get(PREFIX + "machine") == _machine():
        pid, _, start = labels.get(PREFIX + "process", "").partition("-")
        return not pid.isdigit() or process_start(int(pid)) != start
    return listed.get("State") != "running" and now - listed.get("Created", now) > ABANDONED_AFTER_S


def _machine() -> str:
    """Same boot and same process namespace: where a pid means the same process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
