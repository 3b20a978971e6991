"""Checks of the network: ports, addresses and Redis, before a run."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from penstock.common import HOST_VARIABLE, is_loopback, own_host, reachable_host
from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check, human, skipped, warning
from penstock.deploy.run.connection import PASSWORD_VARIABLE, USER_VARIABLE, redis_login
from penstock.deploy.run.plan import lent_servers
from penstock.transfer_queue import QueueError, QueueUnavailable
from penstock.transfer_queue.redis import Connection, redact


def check_ports(config: RunConfig) -> Iterator[Check]:
    rollout, page = config.rollout, config.dashboard
    servers = rollout.servers + rollout.evaluation_server + lent_servers(config)
    if rollout.servers:
        ports = range(rollout.port, rollout.port + servers) if rollout.port else [0]
        yield _listened("rollout", rollout.host, ports, "host", "port")
    if rollout.serves_weights:
        yield _listened("rollout", rollout.weights_host, [rollout.weights_port], "weights_host", "weights_port")
    if page.enabled:
        yield _listened("dashboard", page.host, [page.port], "host", "port")


def _listened(section: str, host: str, ports: Sequence[int], host_key: str, port_key: str) -> Check:
    name = f"{section}.{port_key}"
    for port in ports:
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except socket.gaierror as error:
            fix = f"set {section}.{host_key} to an address or name of this machine"
            return Check(f"{section}.{host_key}", False, f"{host}: {error.strerror}", fix)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                fix = f"set {section}.{host_key} to an address of this machine, or to 0.0.0.0 for all of them"
                return Check(f"{section}.{host_key}", False, f"{host} is not of this machine", fix)
            fix = f"stop what listens there, or set {name}=0 to take free ports"
            return Check(name, False, f"{host}:{port}: {error.strerror}", fix)
    return Check(
        name, True, f"{ports[0]} and up are free" if ports[0] else f"free ports of {host}, chosen at the start"
    )


def check_advertised(config: RunConfig) -> Iterator[Check]:
    """The address that this machine announces, and whether other machines can reach it."""
    rollout = config.rollout
    if reachable_host(rollout.host) != rollout.host and rollout.servers:
        yield _own_name()
    if rollout.servers or not config.transfer_queue.url:
        return
    if rollout.weight_transport == "shm":
        yield warning(
            "rollout.weight_transport",
            "rollout.servers is 0, and weights go through shared memory, which servers elsewhere cannot read",
            "set rollout.weight_transport=http, or disk on a disk that all machines share",
        )


def check_weights_host(config: RunConfig) -> Check | None:
    """No server on this machine and a queue on another: servers elsewhere find nothing at a loopback address.

    None where servers may be here: a queue at a loopback address is reached from this machine alone.
    """
    rollout, url = config.rollout, config.transfer_queue.url
    if rollout.servers or not url or is_loopback(urlsplit(url).hostname) or not rollout.serves_weights:
        return None
    return Check(
        "rollout.weights_host",
        not is_loopback(rollout.weights_host),
        f"rollout.servers is 0, so servers are elsewhere, and weights are served on {rollout.weights_host}",
        "set rollout.weights_host to an address that they reach, or to 0.0.0.0",
    )


def _own_name() -> Check:
    name = own_host()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        fix = f"set {HOST_VARIABLE} to this machine's address, or rollout.host to it"
        return Check("rollout.host", False, f"this machine is advertised as {name}: {error}", fix)
    if is_loopback(address):
        fix = f"set {HOST_VARIABLE} to this machine's address, or let {name} stand for it in DNS or /etc/hosts"
        return warning("rollout.host", f"this machine is advertised as {name}, which is {address} here", fix)
    return Check("rollout.host", True, f"advertised as {name}, {address}")


ANSWER_DEADLINE_S = 5.0
OVERHEAD = 1.1
"""Redis's memory per byte that `max_bytes` counts."""


def check_redis(config: RunConfig) -> Check:
    """Without asking a Redis of one's own, which may still be starting: a run waits for it, and judges it then."""
    from penstock.transfer_queue.redis import find_redis_server

    if config.transfer_queue.url:
        return Check("redis", True, f"the one at {redact(config.transfer_queue.url)}")
    try:
        binary = find_redis_server()
    except QueueError as error:
        return Check(
            "redis-server", False, str(error), "install redis-server, or set transfer_queue.url to another Redis"
        )
    return Check("redis-server", True, binary.path)


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
        return [Check("redis", False, str(error), _fix(error))]
    try:
        infos = await connection.infos()
        version = infos[0].get("redis_version")
        reached = Check("redis", True, f"{redact(url)}: Redis {version}, noeviction, {len(infos)} node(s)")
        off = [info for info in infos if not info.get("aof_enabled")]
        return [
            reached,
            Check(
                "redis appendonly",
                not off,
                f"appendonly is off on {len(off)} of {len(infos)} nodes: a restart would lose the run" if off else "on",
                "CONFIG SET appendonly yes, and `appendonly yes` in its redis.conf",
            ),
            _memory(infos, max_bytes),
            await _clock(connection),
        ]
    except QueueError as error:
        return [Check("redis", False, str(error), _fix(error))]
    finally:
        await connection.close()


def _fix(error: QueueError) -> str:
    if isinstance(error, QueueUnavailable):
        return "start that Redis, let this machine reach its port, or correct transfer_queue.url"
    text = str(error)
    if "refused the login" in text:
        return f"set {USER_VARIABLE} and {PASSWORD_VARIABLE} as that Redis has them (`penstock queue acl` makes users)"
    if "noeviction" in text:
        return "CONFIG SET maxmemory-policy noeviction, and in its redis.conf"
    return text


def _memory(infos: list[dict[str, Any]], max_bytes: int) -> Check:
    most = [int(info.get("maxmemory", 0)) or int(info.get("total_system_memory", 0)) for info in infos]
    used = [int(info.get("used_memory", 0)) for info in infos]
    room = sum(max(0, size - taken) for size, taken in zip(most, used, strict=True))
    needed = int(max_bytes * OVERHEAD)
    detail = f"{human(room)} left, transfer_queue.max_bytes needs {human(needed)}"
    fix = f"raise its maxmemory, or set transfer_queue.max_bytes={int(room / OVERHEAD)} or less"
    limited = any(int(info.get("maxmemory", 0)) for info in infos)
    if room < needed and not limited:  # the machine's memory, which others share
        return warning("redis memory", detail, fix)
    return Check("redis memory", room >= needed, detail, fix)


async def _clock(connection: Connection) -> Check:
    """The answer was given at some moment of the round trip; the shortest of a few says it best."""
    samples = []
    for _ in range(5):
        sent = time.time()
        seconds, micros = await connection.command("TIME")
        received = time.time()
        samples.append((received - sent, int(seconds) + int(micros) / 1e6 - (sent + received) / 2))
    round_trip_s, skew_s = min(samples)
    sure_s = max(0.0, abs(skew_s) - round_trip_s / 2)
    # Leases are Redis's own matter; logs, curves and TLS of several machines are read side by side.
    return Check(
        "clock",
        sure_s <= 1.0,
        f"Redis's clock is {skew_s:+.3f} s from ours (round trip {1000 * round_trip_s:.1f} ms)",
        "let both machines keep time by NTP: `timedatectl set-ntp true`, or chrony",
    )
