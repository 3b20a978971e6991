"""What a redis-server must be to hold a queue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.transfer_queue.queue import QueueError

FLOOR_VERSION = (6, 2)


def check_server(info: Mapping[str, Any], where: str) -> None:
    """`info` is the reply to INFO. Raises `QueueError` where the server is too old or evicts keys."""
    at = f"{where} (its node on port {info['tcp_port']})" if info.get("cluster_enabled") else where
    version = str(info.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2]) < FLOOR_VERSION:
        raise QueueError(f"{at} runs Redis {version}; 6.2 or newer is needed")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise QueueError(
            f"{at} evicts keys when full (maxmemory-policy {policy}), which would lose trajectories;"
            " set it to noeviction"
        )
