"""Answers of another form than expected: they stop no server that fetches, and no round that waits for members."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.weight_sync.conftest import TOKEN, OpenRoute, file_of, parts_of, small_tensors

torch = pytest.importorskip("torch")

from penstock.common import Backoff
from penstock.weight_sync import (
    TURN_S,
    Broadcaster,
    Downloader,
    FileServer,
    WeightPublisher,
    WeightsRefused,
    WeightsUnreachable,
    read_verified,
)

pytestmark = pytest.mark.torch
BEARER = {"Authorization": f"Bearer {TOKEN}"}


# over HTTP -----------------------------------------------------------------------------------------------------------
async def test_answer_that_says_to_try_again_is_tried_again(
    tmp_path: Path, open_route: OpenRoute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy answers for a trainer that restarts: four times, and then for good."""
    monkeypatch.setattr("penstock.weight_sync.http_client.RECONNECT", Backoff(0.001))
    route = await open_route("http")
    manifest, refusals = route.publish(1, small_tensors()), 4

    async def answer(_request: web.Request) -> web.StreamResponse:
        nonlocal refusals
        refusals -= 1
        return web.Response(status=502) if refusals >= 0 else web.FileResponse(route.file(manifest))

    app = web.Application()
    app.router.add_get("/{name}", answer)
    async with TestServer(app) as proxy:
        own = replace(manifest.files[-1], place=str(proxy.make_url(f"/{manifest.files[-1].name}")))
        manifest = replace(manifest, files=(own,))
        local = await asyncio.to_thread(Downloader(tmp_path / "s0", TOKEN, stall_s=60).localise, manifest)
        assert torch.equal(read_verified(local)["last"], small_tensors()["last"])
        refusals = 100
        with pytest.raises(WeightsUnreachable, match=r"502.*given up after 5"):
            await asyncio.to_thread(Downloader(tmp_path / "s1", TOKEN, stall_s=60).localise, manifest)


async def test_file_whose_header_lacks_its_checksums_is_refused(tmp_path: Path, open_route: OpenRoute) -> None:
    route = await open_route("http")
    manifest = route.publish(1, small_tensors())
    header, data = parts_of(route.file(manifest))
    del header["__metadata__"]["xxh3"]
    other = file_of(header, data)
    route.file(manifest).write_bytes(other)
    manifest = replace(manifest, files=(replace(manifest.files[-1], bytes=len(other)),))
    with pytest.raises(WeightsRefused, match="its header is damaged: KeyError"):
        await asyncio.to_thread(Downloader(tmp_path / "s0", TOKEN).localise, manifest)


async def test_answer_that_broke_off_gives_its_turn_to_the_next(tmp_path: Path) -> None:
    """A server dies while it fetches: the next one does not wait until the turn would have ended."""
    server = FileServer(tmp_path / "published", TOKEN, share_from_bytes=0)
    await server.start()
    tensors = {"w": torch.zeros(16 << 20)}  # more than the sockets between them hold
    manifest = WeightPublisher(tmp_path / "published", "http", base_url=server.url).write(1, tensors.items())
    name, port = manifest.files[-1].name, int(server.url.rpartition(":")[2])
    dying = socket.create_connection(("127.0.0.1", port))
    peer = "Penstock-Serves: http://10.0.0.1:1"
    dying.sendall(f"GET /{name} HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {TOKEN}\r\n{peer}\r\n\r\n".encode())
    assert await asyncio.to_thread(dying.recv, 12) == b"HTTP/1.1 200"
    async with httpx.AsyncClient(headers={**BEARER, "Penstock-Serves": "http://10.0.0.2:1"}, timeout=60) as client:
        assert (await client.get(manifest.place)).status_code == 503
        dying.close()
        async with asyncio.timeout(TURN_S):  # the turn of so large a file lasts longer
            while (await client.get(manifest.place, headers={"Range": "bytes=0-9"})).status_code == 503:
                await asyncio.sleep(0.05)
    await server.stop()


# broadcasts ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seat", [{"port": 1}, [], 3, {"port": 1, "colour": "red"}, None], ids=repr)
async def test_seat_that_is_none_costs_the_round_and_no_more(
    tmp_path: Path, open_route: OpenRoute, seat: object
) -> None:
    route = await open_route("http")
    manifest = route.publish(1, small_tensors())

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(text="no JSON") if seat is None else web.json_response(seat)

    app = web.Application()
    app.router.add_post("/rounds/1", answer)
    async with TestServer(app) as other:
        downloader = Downloader(tmp_path / "s0", TOKEN)
        offered = replace(manifest, broadcast=str(other.make_url("/rounds/1")))
        local = await asyncio.to_thread(downloader.localise, offered)
    assert torch.equal(read_verified(local)["last"], small_tensors()["last"])
    assert downloader.bytes_received == {"trainer": manifest.bytes, "peers": 0, "rounds": 0}


async def test_round_that_cannot_listen_refuses_its_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Broadcaster(window_s=60)
    server = FileServer(tmp_path / "published", TOKEN, broadcaster=rounds)
    await server.start()
    publisher = WeightPublisher(tmp_path / "published", "collective", base_url=server.url)
    name = rounds.offer(Path(server._directory) / publisher.write(1, small_tensors().items()).files[-1].name, 1)
    rounds._host = "203.0.113.9"  # of no machine
    async with httpx.AsyncClient(headers=BEARER, timeout=20) as client:
        answer = await client.post(f"{server.url}/rounds/{name}")
    assert (answer.status_code, "203.0.113.9" in answer.text) == (409, True)
    await server.stop()


async def test_round_whose_members_do_not_come_ends(tmp_path: Path) -> None:
    rounds = Broadcaster(window_s=60, silence_s=0.5)
    server = FileServer(tmp_path / "published", TOKEN, broadcaster=rounds)
    await server.start()
    publisher = WeightPublisher(tmp_path / "published", "collective", base_url=server.url)
    path = tmp_path / "published" / publisher.write(1, small_tensors().items()).files[-1].name
    name = rounds.offer(path, 1)
    async with httpx.AsyncClient(headers=BEARER, timeout=20) as client:
        assert (await client.post(f"{server.url}/rounds/{name}")).status_code == 200
    async with asyncio.timeout(60):
        await rounds.settle()
    assert rounds.last == (1, 0)
    assert rounds.offer(path), "the next round may begin"
    await server.stop()


async def test_round_that_is_closed_holds_no_file(tmp_path: Path) -> None:
    """A trainer that stops within a round's window: `close` returns when nothing of the round is left."""
    rounds, path = Broadcaster(window_s=60), tmp_path / "weights"
    path.write_bytes(b"bytes")
    assert rounds.offer(path)
    current = rounds._round
    assert current is not None
    async with asyncio.timeout(30):
        await rounds.close()
    assert current.file.closed
