"""Redis, sandbox servers, search servers, and boxes that hold nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence

import pytest
from redis.asyncio import Redis
from tests.deploy.preflight.planting import Place, planted, unused_port
from tests.deploy.preflight.skewed_clock import skewed

from benchmarks.support.boxes import sandbox_server
from penstock.deploy.preflight.agent import check_search
from penstock.deploy.preflight.network import check_own_redis
from penstock.deploy.preflight.sandbox import check_containment, check_sandbox
from penstock.sandbox import SandboxConfig
from penstock.transfer_queue import RedisServer

PASSWORD = "only-for-this-test"
Opened = AsyncIterator[Sequence[str]]
UNSAFE = ["sandbox.backend=unsafe_subprocess"]


@contextlib.asynccontextmanager
async def redis_of(place: Place, *command: str, maxmemory: int = 0) -> AsyncIterator[RedisServer]:
    """A real one, logged in to by the environment, told `command` once it runs."""
    async with RedisServer(place.folder / "redis", PASSWORD, maxmemory=maxmemory) as server:
        place.monkeypatch.setenv("PENSTOCK_REDIS_PASSWORD", PASSWORD)
        if command:
            async with Redis.from_url(server.url, password=PASSWORD) as client:
                await client.execute_command(*command)
        yield server


@planted(check_own_redis, "redis", r"maxmemory-policy noeviction")
@contextlib.asynccontextmanager
async def a_redis_that_evicts(place: Place) -> Opened:
    async with redis_of(place, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru") as server:
        yield [f"transfer_queue.url={server.url}"]


@planted(check_own_redis, "redis appendonly", r"CONFIG SET appendonly yes")
@contextlib.asynccontextmanager
async def a_redis_that_forgets_at_a_restart(place: Place) -> Opened:
    async with redis_of(place, "CONFIG", "SET", "appendonly", "no") as server:
        yield [f"transfer_queue.url={server.url}"]


@planted(check_own_redis, "redis memory", r"transfer_queue\.max_bytes=\d+ or less")
@contextlib.asynccontextmanager
async def a_redis_with_less_memory_than_the_run_may_take(place: Place) -> Opened:
    async with redis_of(place, maxmemory=64 << 20) as server:
        yield [f"transfer_queue.url={server.url}"]


@planted(check_own_redis, "redis", r"PENSTOCK_REDIS_PASSWORD")
@contextlib.asynccontextmanager
async def a_wrong_password(place: Place) -> Opened:
    async with redis_of(place) as server:
        place.monkeypatch.setenv("PENSTOCK_REDIS_PASSWORD", "somebody-elses")
        yield [f"transfer_queue.url={server.url}"]


@planted(check_own_redis, "redis", r"reach its port, or correct transfer_queue\.url")
def a_redis_that_is_away(place: Place) -> Sequence[str]:
    place.monkeypatch.setattr("penstock.deploy.preflight.network.ANSWER_DEADLINE_S", 0.2)
    return [f"transfer_queue.url=redis://127.0.0.1:{unused_port()}"]


@planted(check_own_redis, "clock", r"NTP")
@contextlib.asynccontextmanager
async def a_clock_two_minutes_ahead(place: Place) -> Opened:
    async with redis_of(place) as server, skewed(server.port, 120) as port:
        yield [f"transfer_queue.url=redis://127.0.0.1:{port}"]


@planted(check_sandbox, "sandbox", r"sandbox server http://127\.0\.0\.1:\d+: ClientConnectorError")
def a_sandbox_server_that_is_away(place: Place) -> Sequence[str]:
    place.monkeypatch.setenv("PENSTOCK_TOKEN", "of-this-run")
    return ["sandbox.backend=remote", f"sandbox.url=http://127.0.0.1:{unused_port()}"]


@planted(check_sandbox, "sandbox", r"refuses this token")
@contextlib.asynccontextmanager
async def a_sandbox_server_with_another_token(place: Place) -> Opened:
    async with sandbox_server(SandboxConfig(), "of another run") as server:
        place.monkeypatch.setenv("PENSTOCK_TOKEN", "of-this-run")
        yield ["sandbox.backend=remote", f"sandbox.url={server.url}"]


@planted(check_search, "search server", r"penstock search-server")
def a_search_server_that_is_away(place: Place) -> Sequence[str]:
    return [f"tools=[{{name: search, settings: {{url: 'http://127.0.0.1:{unused_port()}/retrieve'}}}}]"]


@planted(check_search, "search server", r"set PENSTOCK_SEARCH_TOKEN")
@contextlib.asynccontextmanager
async def a_search_server_with_another_token(place: Place) -> Opened:
    pytest.importorskip("tantivy")
    from tests.tools.conftest import _serving as served

    from penstock.tools.retrieval import build_app, open_or_build

    corpus = place.file("corpus.jsonl", json.dumps({"id": "1", "title": "Paris", "text": "Capital of France."}))
    async with served(build_app(open_or_build(corpus), "of another server")) as url:
        place.monkeypatch.setenv("PENSTOCK_SEARCH_TOKEN", "of-this-run")
        yield [f"tools=[{{name: search, settings: {{url: '{url}/retrieve'}}}}]"]


@planted(check_containment, "containment: network", r"sandbox\.backend=bwrap")
def boxes_that_reach_the_network(place: Place) -> Sequence[str]:
    return UNSAFE


@planted(check_containment, "containment: processes", r"sandbox\.backend=bwrap")
def boxes_that_start_processes_without_end(place: Place) -> Sequence[str]:
    return UNSAFE


@planted(check_containment, "containment: host files", r"sandbox\.backend=bwrap")
def boxes_that_read_the_hosts_files(place: Place) -> Sequence[str]:
    return UNSAFE
