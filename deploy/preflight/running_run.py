"""Checks of a running run: which of its roles can reach each other.

    here ──► queue · each server's /health · the newest weights
    server ──► queue (reported by its /health) · trainer's weights (POST /weights makes it fetch them now)

Nothing connects to agent workers, so only the episodes they hold are reported.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml

from penstock.common import is_loopback
from penstock.deploy.config import RunConfig, parse_config
from penstock.deploy.preflight.check import Check, warning
from penstock.deploy.preflight.network import ANSWER_DEADLINE_S, examine_redis
from penstock.deploy.run.connection import TOKEN_VARIABLE, RunConnection
from penstock.transfer_queue import Announcement, QueueError, ServerInfo, TransferQueueConfig

PULL_S = 30.0
"""POST /weights answers after 10 s at most."""
SERVED = ("http", "broadcast")
UNREACHED = (httpx.HTTPError, httpx.InvalidURL, TimeoutError)


async def config_of(link: RunConnection) -> RunConfig:
    """Return the configuration in the queue. Raises `QueueError`, soon."""
    async with link.connected(TransferQueueConfig(deadline_s=ANSWER_DEADLINE_S)) as queue:
        text = await queue.config()
    return parse_config(yaml.safe_load(text), source=f"the queue's run {link.run!r}")


async def why_not(link: RunConnection, error: QueueError) -> list[Check]:
    """Return the reason why `config_of` could not read a queue."""
    redis = await examine_redis(link.url, link.username, link.password, TransferQueueConfig().max_bytes)
    fix = "start it (`penstock run`), or name another with PENSTOCK_RUN"
    return [*redis, Check("queue", False, str(error), fix)]


async def check_run(link: RunConnection, config: RunConfig) -> list[Check]:
    """`config` is what the queue holds of the run."""
    redis = await examine_redis(link.url, link.username, link.password, config.transfer_queue.max_bytes)
    if not all(check.ok for check in redis if check.name == "redis"):
        return redis
    queue = await link.connect(TransferQueueConfig(deadline_s=ANSWER_DEADLINE_S))
    headers = {"Authorization": f"Bearer {link.token}"}
    try:
        # No timeout of httpx's: it is for each read, and an answer that comes byte by byte would never be late.
        # Certificates are those that the system trusts: httpx's own are certifi's alone.
        trusted = ssl.create_default_context()
        async with httpx.AsyncClient(headers=headers, timeout=None, trust_env=False, verify=trusted) as http:  # noqa: S113
            status, servers, newest = await queue.status(), await queue.servers(), await queue.latest_version()
            holders = ", ".join(f"{name} ({count})" for name, count in sorted(status.workers.items()))
            detail = f"run {link.run}, version {status.version}; workers: {holders or 'none holds an episode'}"
            answers = await asyncio.gather(*(_server(http, server, link) for server in servers))
            if not servers:
                fix = "start one: penstock rollout, or rollout.servers=1"
                answers.append([warning("servers", "none is in the registry", fix)])
            of_servers = [check for checks in answers for check in checks]
            return [*redis, Check("queue", True, detail), *of_servers, *await _weights(http, newest)]
    except QueueError as error:
        return [
            *redis,
            Check("queue", False, str(error), "see the checks of redis, and the rights of this role's user of Redis"),
        ]
    finally:
        await queue.close()


async def _server(http: httpx.AsyncClient, server: ServerInfo, link: RunConnection) -> list[Check]:
    name = f"server {server.server_id}"
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            answer = await http.get(f"{server.url}/health")
    except UNREACHED as error:
        detail = f"{server.url}: {type(error).__name__} {error}".strip()
        fix = "let this machine resolve its name and reach its port, or start it with --host ADDRESS and a fixed --port"
        if is_loopback(urlsplit(server.url).hostname) and not is_loopback(urlsplit(link.url).hostname):
            where = "(or `penstock rollout --host`) on its machine"
            fix = f"it announced a loopback address: set rollout.host=0.0.0.0 {where}"
        return [Check(name, False, detail, fix)]
    if answer.status_code == HTTPStatus.UNAUTHORIZED:
        fix = f"set {TOKEN_VARIABLE} to the run's token, as its connect.env has it"
        return [Check(name, False, f"{server.url} refuses this token", fix)]
    return list(_judged(name, server, _body(answer), await _pulled(http, server)))


def _judged(name: str, server: ServerInfo, health: Mapping[str, Any], pulled: Check) -> Iterator[Check]:
    yield Check(
        name,
        bool(health.get("ok")),
        f"{server.url}: version {health.get('version')}, {health.get('in_flight')} in flight"
        + ("" if health.get("ok") else f"; it takes no requests: {health.get('cause')}"),
        "see its log and the engine's next to it; it comes back by itself if it is still starting",
    )
    line = str(health.get("queue", "it does not say"))
    fix = "let its machine reach Redis, and give it the login of the role rollout"
    yield Check(f"{name} → queue", line == "ok", line, fix)
    yield pulled


async def _pulled(http: httpx.AsyncClient, server: ServerInfo) -> Check:
    """The way back: the server is asked to fetch the newest weights now, from wherever the trainer has them."""
    name = f"server {server.server_id} → weights"
    fix = "set rollout.weights_host to an address of the trainer's machine that servers reach (0.0.0.0 for its name)"
    try:
        async with asyncio.timeout(PULL_S):
            health = _body(await http.post(f"{server.url}/weights", json={"action": "pull"}))
    except UNREACHED as error:
        return Check(name, False, f"{type(error).__name__} {error}".strip(), fix)
    behind = int(health.get("behind_versions") or 0)
    cause = health.get("cause") or (f"{behind} versions behind" if behind > 1 else "")
    return Check(name, not cause, str(cause or f"holds version {health.get('version')}"), fix)


async def _weights(http: httpx.AsyncClient, newest: Announcement | None) -> list[Check]:
    """Check that a server on this machine could fetch the newest version."""
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
        async with (
            asyncio.timeout(ANSWER_DEADLINE_S),
            http.stream("GET", url, headers={"Range": "bytes=0-0"}) as answer,
        ):
            return [Check("weights", answer.status_code < 400, f"{url}: HTTP {answer.status_code}", fix)]
    except UNREACHED as error:
        return [Check("weights", False, f"{url}: {type(error).__name__} {error}".strip(), fix)]


def _body(answer: httpx.Response) -> dict[str, Any]:
    """Empty if the answer is not a JSON object: something else listens there."""
    try:
        body = answer.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
