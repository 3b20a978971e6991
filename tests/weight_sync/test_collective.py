"""Broadcasts between real processes: ready servers get the bytes together; a death costs that broadcast only."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.weight_sync.conftest import Route
from tests.weight_sync.processes import (
    BUCKET_BYTES,
    SILENCE_S,
    TOKEN,
    ServerProcess,
    big,
    started,
    state,
)

torch = pytest.importorskip("torch")

from dataclasses import replace

from penstock.weight_sync import Broadcaster, FileServer, Manifest

pytestmark = pytest.mark.torch


@pytest.fixture
async def trainer(tmp_path: Path) -> AsyncIterator[Route]:
    rounds = Broadcaster(window_s=60, bucket_bytes=BUCKET_BYTES, silence_s=SILENCE_S)
    server = FileServer(tmp_path / "published", TOKEN, broadcaster=rounds)
    await server.start()
    yield Route(tmp_path, "collective", 1, server, rounds)
    await server.stop()


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[list[ServerProcess]]:
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(started("server", tmp_path / f"s{n}", "")) for n in range(2)]
        for server in opened:
            assert await server.hear() == {"ready": True}
        yield opened


async def test_ready_servers_have_it_from_the_round_and_nothing_else(
    trainer: Route, servers: list[ServerProcess]
) -> None:
    for version in (1, 2):
        manifest = trainer.publish(version, big(version), expected=2)
        reports = await asyncio.gather(*(server.fetch(manifest) for server in servers))
        assert [report["holds"] for report in reports] == [state(big(version))] * 2
        assert [report["bytes"] for report in reports] == [
            {"trainer": 0, "peers": 0, "rounds": version * manifest.bytes}
        ] * 2
        await trainer.rounds.settle()
        assert trainer.rounds.last == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.deep)], ids=["killed", "stopped"]
)
async def test_a_member_lost_in_the_middle_costs_the_round_and_no_more(
    trainer: Route, servers: list[ServerProcess], how: signal.Signals, tmp_path: Path
) -> None:
    manifest = trainer.publish(1, big(1), expected=2)
    await servers[0].ask(manifest)
    await servers[1].ask(manifest, stop_after=2 * BUCKET_BYTES)
    assert await servers[1].hear() == "in the middle"
    os.kill(servers[1].process.pid, how)
    report = await servers[0].hear()
    assert report["holds"] == state(big(1))
    assert report["bytes"]["rounds"] >= BUCKET_BYTES, "what came of the round counts"
    assert report["bytes"]["trainer"] == manifest.bytes - report["bytes"]["rounds"]
    await trainer.rounds.settle()
    # The same trainer, the next version, and the lost server's successor on its folder.
    await servers[1].kill()
    async with started("server", tmp_path / "s1", "") as successor:
        await successor.hear()
        manifest = trainer.publish(2, big(2), expected=2)
        reports = await asyncio.gather(servers[0].fetch(manifest), successor.fetch(manifest))
    assert [report["holds"] for report in reports] == [state(big(2))] * 2
    await trainer.rounds.settle()
    assert trainer.rounds.last == (2, 2)


@pytest.mark.slow
async def test_who_comes_late_is_not_waited_for_and_takes_the_file(
    trainer: Route, servers: list[ServerProcess]
) -> None:
    manifest = trainer.publish(1, big(1), expected=1)
    assert (await servers[0].fetch(manifest))["bytes"]["rounds"] == manifest.bytes
    report = await servers[1].fetch(manifest)
    assert report["holds"] == state(big(1))
    assert report["bytes"] == {"trainer": manifest.bytes, "peers": 0, "rounds": 0}
    # Of a round that nobody joined, and of one that was never opened, likewise.
    await trainer.rounds.settle()
    manifest = replace(trainer.publish(2, big(2)), broadcast=f"{trainer.server.url}/rounds/another")
    assert (await servers[1].fetch(manifest))["holds"] == state(big(2))


@pytest.mark.slow
async def test_a_server_that_left_before_the_round_began_is_not_counted_on(
    trainer: Route, servers: list[ServerProcess]
) -> None:
    manifest = trainer.publish(1, big(1), expected=2)
    asking = asyncio.create_task(_join(manifest.broadcast, TOKEN))
    while not trainer.rounds._round.members:
        await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert (await servers[0].fetch(manifest))["bytes"]["rounds"] == manifest.bytes
    await trainer.rounds.settle()
    assert trainer.rounds.last == (1, 1)


@pytest.mark.slow
async def test_the_trainer_killed_in_the_middle_is_waited_for_and_nothing_comes_twice(tmp_path: Path) -> None:
    port = _free_port()
    published = tmp_path / "published"
    async with (
        started("server", tmp_path / "s0", "") as first,
        started("server", tmp_path / "s1", "") as second,
    ):
        for server in (first, second):
            await server.hear()
        async with started("trainer", published, port, 1) as trainer:
            manifest = Manifest.parse(await trainer.hear())
            await second.ask(manifest, stop_after=2 * BUCKET_BYTES)
            await first.ask(manifest)
            assert await second.hear() == "in the middle"
            await trainer.kill()
        report = await first.hear()
        assert "given up after 5 attempts" in report["error"]
        assert (came := report["bytes"]["rounds"]) >= BUCKET_BYTES
        server = FileServer(published, TOKEN, port=port, broadcaster=Broadcaster())
        await server.start()
        report = await first.fetch(manifest)
        assert report["holds"] == state(big(1))
        assert report["bytes"] == {"trainer": manifest.bytes - came, "peers": 0, "rounds": came}
        await server.stop()


async def test_a_round_asks_for_the_token_and_holds_one_version_at_a_time(trainer: Route) -> None:
    manifest = trainer.publish(1, big(1))
    assert (await _join(manifest.broadcast, "another")).status_code == 401
    assert not trainer.publish(2, big(2)).broadcast, "the first one's window is open"


async def _join(url: str, token: str) -> Any:
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=60) as client:
        return await client.post(url)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
