"""Who reaches whom in a living run: from here to every role, and from servers back to queue and trainer.

    here ──► queue · each server's /health · the newest weights
    server ──► queue (its /health tells) · trainer's weights (POST /weights has it fetch them now)

Agent workers are reached by nobody: they ask. What they hold is told.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml

from penstock.deploy.config import RunConfig
from penstock.deploy.link import TOKEN_VARIABLE, Link
from penstock.deploy.load_config import parse_config
from penstock.deploy.preflight.check import Check, warning
from penstock.deploy.preflight.ports import LOOPBACK
from penstock.deploy.preflight.redis import ANSWER_DEADLINE_S, examine_redis
from penstock.transfer_queue import Announcement, QueueError, ServerInfo, TransferQueue, TransferQueueConfig

PULL_S = 30.0
"""POST /weights answers after 10 s at most."""
SERVED = ("http", "collective")


async def config_of(link: Link) -> RunConfig:
    """As the queue has it. Raises `QueueError`, soon."""
    queue = await link.connect(TransferQueueConfig(deadline_s=ANSWER_DEADLINE_S))
    try:
        text = await queue.config()
    finally:
        await queue.close()
    return parse_config(yaml.safe_load(text), source=f"the queue's run {link.run!r}")


async def why_not(link: Link, error: QueueError) -> list[Check]:
    """Of a queue that `config_of` could not read."""
    redis = await examine_redis(link.url, link.username, link.password, TransferQueueConfig().max_bytes)
    mend = "start it (`penstock run`), or name another with PENSTOCK_RUN; docs/deploy.md has each role's rights"
    return [*redis, Check("queue", False, str(error), mend)]


async def check_run(link: Link, config: RunConfig) -> list[Check]:
    """`config` is what the queue holds of the run."""
    redis = await examine_redis(link.url, link.username, link.password, config.transfer_queue.max_bytes)
    if not all(check.ok for check in redis if check.name == "redis"):
        return redis
    queue = await link.connect(TransferQueueConfig(deadline_s=ANSWER_DEADLINE_S))
    headers = {"Authorization": f"Bearer {link.token}"}
    try:
        async with httpx.AsyncClient(headers=headers, timeout=ANSWER_DEADLINE_S) as http:
            return redis + await _ask_all(queue, http, link)
    except QueueError as error:
        return [
            *redis,
            Check("queue", False, str(error), "see the checks of redis, and docs/deploy.md, Rights per role"),
        ]
    finally:
        await queue.close()


async def _ask_all(queue: TransferQueue, http: httpx.AsyncClient, link: Link) -> list[Check]:
    status, servers, newest = await queue.status(), await queue.servers(), await queue.latest_version()
    workers = ", ".join(f"{name} ({held})" for name, held in sorted(status.workers.items())) or "none holds an episode"
    told = Check("queue", True, f"run {link.run}, version {status.version}; workers: {workers}")
    if not servers:
        none = warning("servers", "none is in the registry", "start one: penstock rollout, or rollout.servers=1")
        return [told, none, *await _weights(http, newest)]
    answers = await asyncio.gather(*(_server(http, server, link) for server in servers))
    return [told, *(check for checks in answers for check in checks), *await _weights(http, newest)]


async def _server(http: httpx.AsyncClient, server: ServerInfo, link: Link) -> list[Check]:
    name = f"server {server.server_id}"
    try:
        answer = await http.get(f"{server.url}/health")
    except httpx.HTTPError as error:
        found = f"{server.url}: {type(error).__name__} {error}".strip()
        return [Check(name, False, found, _unreached(server, link))]
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        mend = f"set {TOKEN_VARIABLE} to the run's token, as its connect.env has it"
        return [Check(name, False, f"{server.url} refuses this token", mend)]
    return list(_judged(name, server, answer, await _pulled(http, server)))


def _judged(name: str, server: ServerInfo, answer: httpx.Response, pulled: Check) -> Iterator[Check]:
    health = _body(answer)
    yield Check(
        name,
        bool(health.get("ok")),
        f"{server.url}: version {health.get('version')}, {health.get('in_flight')} in flight"
        + ("" if health.get("ok") else f"; it takes no requests: {health.get('cause')}"),
        "see its log and the engine's beside it; it comes back by itself where it is still starting",
    )
    line = str(health.get("queue", "it does not say"))
    mend = "let its machine reach Redis, and give it the login of the role rollout"
    yield Check(f"{name} → queue", line == "ok", line, mend)
    yield pulled


async def _pulled(http: httpx.AsyncClient, server: ServerInfo) -> Check:
    """The way back: the server is asked to fetch the newest weights now, from wherever the trainer has them."""
    name = f"server {server.server_id} → weights"
    mend = "set rollout.weights_host to an address of the trainer's machine that servers reach (0.0.0.0 for its name)"
    try:
        answer = await http.post(f"{server.url}/weights", json={"action": "pull"}, timeout=PULL_S)
    except httpx.HTTPError as error:
        return Check(name, False, f"{type(error).__name__} {error}".strip(), mend)
    told = _body(answer)
    behind = int(told.get("behind_versions") or 0)
    cause = told.get("cause") or (f"{behind} versions behind" if behind > 1 else "")
    return Check(name, not cause, str(cause or f"holds version {told.get('version')}"), mend)


async def _weights(http: httpx.AsyncClient, newest: Announcement | None) -> list[Check]:
    """Whether a server on this machine could fetch the newest version."""
    if newest is None:
        return []
    if newest.manifest.get("transport") not in SERVED:
        path = str(newest.manifest.get("path", ""))
        if os.path.exists(path):  # noqa: ASYNC240 - a local look
            return [Check("weights", True, path)]
        mend = "no server can run on this machine; for that set rollout.weight_transport=http"
        return [warning("weights", f"{path} is not on this machine", mend)]
    url = str(newest.manifest.get("url", ""))
    mend = "set rollout.weights_host to an address that this machine reaches, and let it through to its port"
    try:
        answer = await http.get(url, headers={"Range": "bytes=0-0"})
    except httpx.HTTPError as error:
        return [Check("weights", False, f"{url}: {type(error).__name__} {error}".strip(), mend)]
    return [Check("weights", answer.is_success, f"{url}: HTTP {answer.status_code}", mend)]


def _unreached(server: ServerInfo, link: Link) -> str:
    host = urlsplit(server.url).hostname
    if host in LOOPBACK and urlsplit(link.url).hostname not in (*LOOPBACK, None):
        return "it is told as a loopback address: set rollout.host=0.0.0.0 (or `penstock rollout --host`) where it runs"
    return "let this machine resolve its name and reach its port, or start it with --host ADDRESS and a fixed --port"


def _body(answer: httpx.Response) -> dict[str, Any]:
    """Empty where the answer is no JSON object: something else listens there."""
    try:
        found = answer.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
