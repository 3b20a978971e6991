"""Checks of the network: ports, Redis, and which roles of a running run reach each other.

    here ──► queue · each server's /health · the newest weights
    server ──► queue (reported by its /health) · trainer's weights (POST /weights makes it fetch them now)

Nothing connects to agent workers, so only the episodes they hold are reported.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import yaml

from penstock.common import HOST_VARIABLE, is_loopback, own_host, reachable_host
from penstock.deploy.config import RunConfig, parse_config
from penstock.deploy.connection import PASSWORD_VARIABLE, TOKEN_VARIABLE, USER_VARIABLE, RunConnection, redis_login
from penstock.deploy.plan import lent_servers
from penstock.deploy.preflight.check import Check, human, skipped, warning
from penstock.transfer_queue import (
    Announcement,
    QueueError,
    QueueUnavailable,
    ServerInfo,
    TransferQueue,
    TransferQueueConfig,
)
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
            _bind(host, port)
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
        name, True, f"{ports[0]} and up are free" if ports[0] else f"free ones of {host} are taken at the start"
    )


def _bind(host: str, port: int) -> None:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


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
        found = socket.gethostbyname(name)
    except OSError as error:
        fix = f"set {HOST_VARIABLE} to this machine's address, or rollout.host to it"
        return Check("rollout.host", False, f"this machine is advertised as {name}: {error}", fix)
    if is_loopback(found):
        fix = f"set {HOST_VARIABLE} to this machine's address, or let {name} stand for it in DNS or /etc/hosts"
        return warning("rollout.host", f"this machine is advertised as {name}, which is {found} here", fix)
    return Check("rollout.host", True, f"advertised as {name}, {found}")


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
        return [Check("redis", False, str(error), _fix(error))]
    try:
        infos = await connection.infos()
        version = infos[0].get("redis_version")
        reached = Check("redis", True, f"{redact(url)}: Redis {version}, noeviction, {len(infos)} node(s)")
        return [reached, _append_only(infos), _memory(infos, max_bytes), await _clock(connection)]
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
    fix = f"raise its maxmemory, or set transfer_queue.max_bytes={int(room / OVERHEAD)} or less"
    limited = any(int(info.get("maxmemory", 0)) for info in infos)
    if room < needed and not limited:  # the machine's memory, which others share
        return warning("redis memory", found, fix)
    return Check("redis memory", room >= needed, found, fix)


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


PULL_S = 30.0
"""POST /weights answers after 10 s at most."""
SERVED = ("http", "broadcast")
UNREACHED = (aiohttp.ClientError, TimeoutError)


async def config_of(link: RunConnection) -> RunConfig:
    """As the queue has it. Raises `QueueError`, soon."""
    queue = await link.connect(TransferQueueConfig(deadline_s=ANSWER_DEADLINE_S))
    try:
        text = await queue.config()
    finally:
        await queue.close()
    return parse_config(yaml.safe_load(text), source=f"the queue's run {link.run!r}")


async def why_not(link: RunConnection, error: QueueError) -> list[Check]:
    """Of a queue that `config_of` could not read."""
    redis = await examine_redis(link.url, link.username, link.password, TransferQueueConfig().max_bytes)
    fix = "start it (`penstock run`), or name another with PENSTOCK_RUN; docs/deploy.md has each role's rights"
    return [*redis, Check("queue", False, str(error), fix)]


async def check_run(link: RunConnection, config: RunConfig) -> list[Check]:
    """`config` is what the queue holds of the run."""
    redis = await examine_redis(link.url, link.username, link.password, config.transfer_queue.max_bytes)
    if not all(check.ok for check in redis if check.name == "redis"):
        return redis
    queue = await link.connect(TransferQueueConfig(deadline_s=ANSWER_DEADLINE_S))
    headers = {"Authorization": f"Bearer {link.token}"}
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(ANSWER_DEADLINE_S)) as http:
            return redis + await _ask_all(queue, http, link)
    except QueueError as error:
        return [
            *redis,
            Check("queue", False, str(error), "see the checks of redis, and docs/deploy.md, Rights per role"),
        ]
    finally:
        await queue.close()


async def _ask_all(queue: TransferQueue, http: aiohttp.ClientSession, link: RunConnection) -> list[Check]:
    status, servers, newest = await queue.status(), await queue.servers(), await queue.latest_version()
    workers = ", ".join(f"{name} ({held})" for name, held in sorted(status.workers.items())) or "none holds an episode"
    reached = Check("queue", True, f"run {link.run}, version {status.version}; workers: {workers}")
    if not servers:
        none = warning("servers", "none is in the registry", "start one: penstock rollout, or rollout.servers=1")
        return [reached, none, *await _weights(http, newest)]
    answers = await asyncio.gather(*(_server(http, server, link) for server in servers))
    return [reached, *(check for checks in answers for check in checks), *await _weights(http, newest)]


async def _server(http: aiohttp.ClientSession, server: ServerInfo, link: RunConnection) -> list[Check]:
    name = f"server {server.server_id}"
    try:
        async with http.get(f"{server.url}/health") as answer:
            status, health = answer.status, await _body(answer)
    except UNREACHED as error:
        found = f"{server.url}: {type(error).__name__} {error}".strip()
        return [Check(name, False, found, _unreached(server, link))]
    if status == HTTPStatus.UNAUTHORIZED:
        fix = f"set {TOKEN_VARIABLE} to the run's token, as its connect.env has it"
        return [Check(name, False, f"{server.url} refuses this token", fix)]
    return list(_judged(name, server, health, await _pulled(http, server)))


def _judged(name: str, server: ServerInfo, health: Mapping[str, Any], pulled: Check) -> Iterator[Check]:
    yield Check(
        name,
        bool(health.get("ok")),
        f"{server.url}: version {health.get('version')}, {health.get('in_flight')} in flight"
        + ("" if health.get("ok") else f"; it takes no requests: {health.get('cause')}"),
        "see its log and the engine's beside it; it comes back by itself where it is still starting",
    )
    line = str(health.get("queue", "it does not say"))
    fix = "let its machine reach Redis, and give it the login of the role rollout"
    yield Check(f"{name} → queue", line == "ok", line, fix)
    yield pulled


async def _pulled(http: aiohttp.ClientSession, server: ServerInfo) -> Check:
    """The way back: the server is asked to fetch the newest weights now, from wherever the trainer has them."""
    name = f"server {server.server_id} → weights"
    fix = "set rollout.weights_host to an address of the trainer's machine that servers reach (0.0.0.0 for its name)"
    try:
        timeout = aiohttp.ClientTimeout(PULL_S)
        async with http.post(f"{server.url}/weights", json={"action": "pull"}, timeout=timeout) as answer:
            health = await _body(answer)
    except UNREACHED as error:
        return Check(name, False, f"{type(error).__name__} {error}".strip(), fix)
    behind = int(health.get("behind_versions") or 0)
    cause = health.get("cause") or (f"{behind} versions behind" if behind > 1 else "")
    return Check(name, not cause, str(cause or f"holds version {health.get('version')}"), fix)


async def _weights(http: aiohttp.ClientSession, newest: Announcement | None) -> list[Check]:
    """Whether a server on this machine could fetch the newest version."""
    if newest is None:
        return []
    if newest.manifest.get("transport") not in SERVED:
        path = str(newest.manifest.get("path", ""))
        if os.path.exists(path):  # noqa: ASYNC240 - a local look
            return [Check("weights", True, path)]
        fix = "no server can run on this machine; for that set rollout.weight_transport=http"
        return [warning("weights", f"{path} is not on this machine", fix)]
    url = str(newest.manifest.get("url", ""))
    fix = "set rollout.weights_host to an address that this machine reaches, and let it through to its port"
    try:
        async with http.get(url, headers={"Range": "bytes=0-0"}) as answer:
            return [Check("weights", answer.ok, f"{url}: HTTP {answer.status}", fix)]
    except UNREACHED as error:
        return [Check("weights", False, f"{url}: {type(error).__name__} {error}".strip(), fix)]


def _unreached(server: ServerInfo, link: RunConnection) -> str:
    host = urlsplit(server.url).hostname
    if is_loopback(host) and not is_loopback(urlsplit(link.url).hostname):
        return "it announced a loopback address: set rollout.host=0.0.0.0 (or `penstock rollout --host`) where it runs"
    return "let this machine resolve its name and reach its port, or start it with --host ADDRESS and a fixed --port"


async def _body(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    """Empty where the answer is no JSON object: something else listens there."""
    try:
        found = await answer.json(content_type=None)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
