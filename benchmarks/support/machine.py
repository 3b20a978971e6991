"""What a reader must know of the machine to compare figures."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from importlib.metadata import version
from typing import Any

import redis.asyncio as aioredis

_PROBE_BYTES = 128 << 20


async def machine(client: aioredis.Redis) -> dict[str, Any]:
    """Cores, versions, settings of the redis-server and how fast the disk under its append-only file is."""
    settings = await client.config_get("append*")
    return {
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "redis_server": (await client.info("server"))["redis_version"],
        "redis_py": version("redis"),
        "appendonly": settings["appendonly"],
        "appendfsync": settings["appendfsync"],
        "disk_mb_per_s": disk_mb_per_s(),
    }


def disk_mb_per_s() -> float:
    """Writing 128 MiB to a temporary file, to the disk."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile() as file:
        began = time.perf_counter()
        for _ in range(_PROBE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return round(_PROBE_BYTES / 1e6 / (time.perf_counter() - began))
