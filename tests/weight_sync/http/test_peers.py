"""Servers that hand on what they fetched: what leaves the trainer, and peers that die, lie or outlive it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.weight_sync.conftest import TOKEN, OpenRoute, Route, next_version, small_tensors

torch = pytest.importorskip("torch")

from penstock.weight_sync import Downloader, read_verified
from penstock.weight_sync.http.server import PeerServer

pytestmark = pytest.mark.torch
SERVERS = 8
OpenPeer = Callable[[str], tuple[Downloader, PeerServer]]


@pytest.fixture
async def trainer(open_route: OpenRoute) -> Route:
    opened: Route = await open_route("http", 3)
    return opened


@pytest.fixture
async def open_peer(tmp_path: Path) -> AsyncIterator[OpenPeer]:
    with contextlib.ExitStack() as stack:

        def open_one(name: str) -> tuple[Downloader, PeerServer]:
            server = PeerServer(tmp_path / name, TOKEN, "127.0.0.1")
            downloader = Downloader(tmp_path / name, TOKEN, stall_s=30, serves=server.start())
            stack.callback(server.stop)
            return downloader, server

        yield open_one


async def fetch(downloader: Downloader, manifest: dict[str, Any]) -> Any:
    return read_verified(await asyncio.to_thread(downloader.localise, manifest))["embed"]


async def test_one_copy_leaves_the_trainer(trainer: Route, open_peer: OpenPeer) -> None:
    peers = [open_peer(f"s{number}")[0] for number in range(SERVERS)]
    tensors, published = small_tensors(), 0
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(SERVERS) as pool:
        for version in range(1, 5):
            tensors = next_version(tensors, version)
            manifest = trainer.publish(version, tensors)
            published += manifest.bytes
            fetching = [loop.run_in_executor(pool, peer.localise, manifest) for peer in peers]
            for local in await asyncio.gather(*fetching):
                assert torch.equal(read_verified(local)["embed"], tensors["embed"])
    received = [peer.bytes_received for peer in peers]
    assert sum(bytes_by["trainer"] for bytes_by in received) == trainer.server.bytes_sent == published
    assert all(bytes_by["trainer"] + bytes_by["peers"] == published for bytes_by in received)


async def test_a_peer_that_is_gone_costs_a_try_in_environment(trainer: Route, open_peer: OpenPeer) -> None:
    manifest = trainer.publish(1, small_tensors())
    (first, its_server), (second, _), (third, _) = open_peer("s0"), open_peer("s1"), open_peer("s2")
    await fetch(first, manifest)
    await asyncio.to_thread(_stop_files, its_server)
    assert torch.equal(await fetch(second, manifest), small_tensors()["embed"])
    assert second.bytes_received == {"trainer": manifest.bytes, "peers": 0}
    assert torch.equal(await fetch(third, manifest), small_tensors()["embed"])
    assert third.bytes_received["peers"] == manifest.bytes, "the second one has it now"


async def test_a_peer_that_lies_is_found_out_and_avoided(trainer: Route, open_peer: OpenPeer, tmp_path: Path) -> None:
    manifest = trainer.publish(1, small_tensors())
    (first, _), (second, _) = open_peer("s0"), open_peer("s1")
    await fetch(first, manifest)
    (file,) = (tmp_path / "s0").glob("*-weights-*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert torch.equal(await fetch(second, manifest), small_tensors()["embed"])
    assert second.bytes_received == {"trainer": manifest.bytes, "peers": manifest.bytes}


async def test_a_peer_with_half_a_file_is_gone_on_from_elsewhere(
    trainer: Route, open_peer: OpenPeer, tmp_path: Path
) -> None:
    manifest = trainer.publish(1, small_tensors())
    (first, _), (second, _) = open_peer("s0"), open_peer("s1")
    await fetch(first, manifest)
    (file,) = (tmp_path / "s0").glob("*-weights-*")
    file.write_bytes(file.read_bytes()[:1000])
    assert torch.equal(await fetch(second, manifest), small_tensors()["embed"])
    assert second.bytes_received["trainer"] == manifest.bytes


async def test_the_trainer_away_peers_that_it_named_have_the_file(trainer: Route, open_peer: OpenPeer) -> None:
    (first, _), (second, _) = open_peer("s0"), open_peer("s1")
    tensors = small_tensors()
    manifest = trainer.publish(1, tensors)
    await fetch(first, manifest)
    await fetch(second, manifest)  # from the first: it knows it now
    tensors = next_version(tensors, 2)
    manifest = trainer.publish(2, tensors)
    await fetch(first, manifest)
    await trainer.server.stop()
    local = await asyncio.to_thread(second.localise, manifest)
    assert torch.equal(read_verified(local)["embed"], tensors["embed"])


async def test_peers_ask_for_the_token_and_serve_whole_files_only(
    trainer: Route, open_peer: OpenPeer, tmp_path: Path
) -> None:
    downloader, server = open_peer("s0")
    manifest = trainer.publish(1, small_tensors())
    await fetch(downloader, manifest)
    (file,) = (tmp_path / "s0").glob("*-weights-*")
    (tmp_path / "s0" / f"{file.name}.part").write_bytes(b"half")
    assert server._files is not None
    async with httpx.AsyncClient(timeout=60) as client:
        assert (await client.get(f"{server._files.url}/{file.name}")).status_code == 401
        client.headers["Authorization"] = f"Bearer {TOKEN}"
        found = await client.get(f"{server._files.url}/{file.name}", headers={"Range": "bytes=9-"})
        assert (found.status_code, found.content) == (206, file.read_bytes()[9:])
        for name in (f"{file.name}.part", "weights-00000001.safetensors", "..%2Fs0"):
            assert (await client.get(f"{server._files.url}/{name}")).status_code == 404


def _stop_files(server: PeerServer) -> None:
    """As if its process had been killed: nobody listens any more, and nobody was told."""
    assert server._files is not None
    asyncio.run_coroutine_threadsafe(server._files.stop(), server._loop).result(60)
