"""Whether the queue's Redis can be reached, logged in to, keeps what it is given, and has room and the right time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from penstock.deploy.config import RunConfig
from penstock.deploy.link import PASSWORD_VARIABLE, USER_VARIABLE, redis_login
from penstock.deploy.preflight.check import Check, skipped, warning
from penstock.deploy.preflight.resources import human
from penstock.transfer_queue import QueueError, QueueUnavailable
from penstock.transfer_queue.redis import Connection, redact

ANSWER_DEADLINE_S = 5.0
MOST_SKEW_S = 1.0
"""Leases are Redis's own matter; logs, curves and TLS of several machines are read side by side."""
ASKED_FOR_TIME = 5
OVERHEAD = 1.1
"""Of what `max_bytes` counts, in Redis's memory."""


def check_redis(config: RunConfig) -> Check:
    """Without asking a Redis of one's own, which may still be starting: a run waits for it, and judges it then."""
    from penstock.transfer_queue.redis import find_redis_server

    if config.transfer_queue.url:
        return Check("redis", True, f"the one at {redact(config.transfer_queue.url)}")
    try:
        found = find_redis_server()
    except QueueError as error:
        return Check("redis-server", False, "not usable", str(error))
    return Check("redis-server", True, found.path)


def check_own_redis(config: RunConfig) -> list[Check]:
    """The Redis that the recipe names, asked for real."""
    url = config.transfer_queue.url
    if not url:
        return [skipped("clock", "Redis runs on this machine")]
    return asyncio.run(examine_redis(url, *redis_login(), config.transfer_queue.max_bytes))


async def examine_redis(url: str, username: str | None, password: str | None, max_bytes: int) -> list[Check]:
    try:
        connection = await Connection.connect(url, deadline_s=ANSWER_DEADLINE_S, password=password, username=username)
    except QueueError as error:
        return [Check("redis", False, str(error), _mend(error))]
    try:
        infos = await connection.infos()
        version = infos[0].get("redis_version")
        told = Check("redis", True, f"{redact(url)}: Redis {version}, noeviction, {len(infos)} node(s)")
        return [told, _append_only(infos), _memory(infos, max_bytes), await _clock(connection)]
    except QueueError as error:
        return [Check("redis", False, str(error), _mend(error))]
    finally:
        await connection.close()


def _mend(error: QueueError) -> str:
    if isinstance(error, QueueUnavailable):
        return "start that Redis, let this machine reach its port, or correct transfer_queue.url"
    text = str(error)
    if "refused the login" in text:
        return f"set {USER_VARIABLE} and {PASSWORD_VARIABLE} as that Redis has them (`penstock queue acl` makes users)"
    if "noeviction" in text:
        return "CONFIG SET maxmemory-policy noeviction, and in its redis.conf"
    return text


def _append_only(infos: list[dict[str, Any]]) -> Check:
    off = [info for info in infos if not info.get("aof_enabled")]
    return Check(
        "redis appendonly",
        not off,
        f"appendonly is off on {len(off)} of {len(infos)} nodes: a restart would lose the run" if off else "on",
        "CONFIG SET appendonly yes, and `appendonly yes` in its redis.conf",
    )


def _memory(infos: list[dict[str, Any]], max_bytes: int) -> Check:
    room = sum(max(0, _most(info) - int(info.get("used_memory", 0))) for info in infos)
    needed = int(max_bytes * OVERHEAD)
    found = f"{human(room)} left, transfer_queue.max_bytes needs {human(needed)}"
    mend = f"raise its maxmemory, or set transfer_queue.max_bytes={int(room / OVERHEAD)} or less"
    limited = any(int(info.get("maxmemory", 0)) for info in infos)
    if room < needed and not limited:  # the machine's memory, which others share
        return warning("redis memory", found, mend)
    return Check("redis memory", room >= needed, found, mend)


def _most(info: Mapping[str, Any]) -> int:
    return int(info.get("maxmemory", 0)) or int(info.get("total_system_memory", 0))


async def _clock(connection: Connection) -> Check:
    """The answer was given at some moment of the round trip; the shortest of a few says it best."""
    samples = [await _skew(connection) for _ in range(ASKED_FOR_TIME)]
    round_trip_s, skew_s = min(samples)
    sure_s = max(0.0, abs(skew_s) - round_trip_s / 2)
    return Check(
        "clock",
        sure_s <= MOST_SKEW_S,
        f"Redis's clock is {skew_s:+.3f} s from ours (round trip {1000 * round_trip_s:.1f} ms)",
        "let both machines keep time by NTP: `timedatectl set-ntp true`, or chrony",
    )


async def _skew(connection: Connection) -> tuple[float, float]:
    """Length of the round trip, and Redis's clock minus ours, in seconds."""
    sent = time.time()
    seconds, micros = await connection.command("TIME")
    received = time.time()
    return received - sent, int(seconds) + int(micros) / 1e6 - (sent + received) / 2
