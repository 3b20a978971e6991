"""Answers of another form than expected: they stop no server that fetches, and no member of a broadcast."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.broadcasting import StagedServer
from tests.until import until
from tests.weight_sync.conftest import TOKEN, OpenRoute, file_of, parts_of, small_tensors
from tests.weight_sync.http.http_parts import RecordedPauses

torch = pytest.importorskip("torch")

from penstock.common import Backoff, cancel_and_wait
from penstock.weight_sync import (
    Broadcaster,
    BroadcastMember,
    Downloader,
    FileServer,
    Offer,
    StagedFetch,
    WeightPublisher,
    WeightsRefused,
    WeightsUnreachable,
    read_verified,
)
from penstock.weight_sync.http.scheduler import TURN_S

pytestmark = pytest.mark.torch
BEARER = {"Authorization": f"Bearer {TOKEN}"}


# over HTTP -----------------------------------------------------------------------------------------------------------
async def test_answer_that_says_to_try_again_is_tried_again(
    tmp_path: Path, open_route: OpenRoute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy answers for a trainer that restarts: four times, and then for good."""
    monkeypatch.setattr("penstock.weight_sync.http.client.RECONNECT", Backoff(0.001))
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
    with pytest.raises(WeightsRefused, match="its header is damaged"):
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


async def test_file_without_the_checksum_of_a_tensor_is_refused(tmp_path: Path, open_route: OpenRoute) -> None:
    route = await open_route("http")
    manifest = route.publish(1, small_tensors())
    header, data = parts_of(route.file(manifest))
    header["__metadata__"]["xxh3"] = "{}"
    other = file_of(header, data)
    route.file(manifest).write_bytes(other)
    manifest = replace(manifest, files=(replace(manifest.files[-1], bytes=len(other)),))
    with pytest.raises(WeightsRefused, match=r"its header is damaged: KeyError\('embed'\)"):
        await asyncio.to_thread(Downloader(tmp_path / "s0", TOKEN).localise, manifest)


async def test_file_waits_for_turns_where_its_server_hands_it_on(tmp_path: Path, open_route: OpenRoute) -> None:
    """A file of `share_from_bytes` or more; a server that hands nothing on does not wait."""
    manifest = (await open_route("http")).publish(1, small_tensors())
    for least, second in ((manifest.bytes, 503), (manifest.bytes + 1, 200)):
        server = FileServer(tmp_path / "published", TOKEN, share_from_bytes=least)
        await server.start()
        url = f"{server.url}/{manifest.files[-1].name}"
        async with httpx.AsyncClient(headers=BEARER, timeout=60) as client:
            found = []
            for peer in ({"Penstock-Serves": f"http://{name}:1"} for name in ("a", "b")):
                found.append((await client.get(url, headers=peer)).status_code)
            found += [(await client.get(url)).status_code for _ in range(2)]
            assert found == [200, second, 200, 200]
            assert (await client.put(url, headers={"Penstock-Serves": "ftp://a:1"})).status_code == 400
        await server.stop()


async def test_server_that_stops_sends_its_members_away(tmp_path: Path) -> None:
    broadcaster = Broadcaster()
    server = FileServer(tmp_path, TOKEN, broadcaster=broadcaster)
    await server.start()
    async with httpx.AsyncClient(headers=BEARER, timeout=60) as client:
        place = {"count": 1, "wire": "gloo/1"}
        waiting = asyncio.create_task(client.post(f"{server.url}/broadcasts", json=place))
        await until(lambda: broadcaster.parked == 1)
        await server.stop()
        assert (await waiting).status_code == 204


# broadcasts ----------------------------------------------------------------------------------------------------------
OFFER = {
    "version": 1, "port": 1, "name": "a-1", "first_rank": 1, "count": 1, "size": 2, "bucket_bytes": 9, "silence_s": 1.0,
    "deadline_s": 1.0, "tensors": [{"name": "w", "shape": [3], "dtype": "float32"}],
}  # fmt: skip


def test_offer_is_read_back() -> None:
    assert Offer.parse(Offer.parse(OFFER).as_dict()) == Offer.parse(OFFER)
    assert Offer.parse(OFFER).nbytes == 12


@pytest.mark.parametrize(
    "change",
    [{"bucket_bytes": 1}, {"silence_s": 2}, {"tensors": [{"name": "w", "shape": [0], "dtype": "bool"}]}],
    ids=repr,
)
def test_offer_at_its_limits_is_taken(change: dict[str, object]) -> None:
    assert Offer.parse({**OFFER, **change}).size == 2


def test_workers_of_an_offer_have_places_in_a_row() -> None:
    offer = Offer.parse(OFFER | {"first_rank": 3, "count": 2, "size": 6})
    assert [(offer.member(worker).rank, offer.member(worker).size) for worker in range(2)] == [(3, 6), (4, 6)]


@pytest.mark.parametrize(
    "change",
    [
        {"port": "1"}, {"colour": "red"}, {"tensors": 3}, {"tensors": [{"name": "w"}]}, {"bucket_bytes": 0},
        {"first_rank": 0}, {"first_rank": 2}, {"count": True}, {"silence_s": None},
        {"tensors": [{"name": "w", "shape": [-3], "dtype": "float32"}]},
        {"tensors": [{"name": "w", "shape": [3], "dtype": "complex64"}]},
        {"tensors": [{"name": 3, "shape": [3], "dtype": "float32"}]},
    ],
    ids=repr,
)  # fmt: skip
def test_offer_that_is_none_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="offer"):
        Offer.parse({**OFFER, **change})


@pytest.mark.parametrize(
    ("offer", "status"), [({"port": 1}, 200), ([], 200), (3, 200), (None, 200), (OFFER, 503)], ids=str
)
async def test_member_goes_on_after_an_answer_that_is_no_offer(
    offer: object, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    asked = asyncio.Event()

    async def answer(_request: web.Request) -> web.Response:
        if "no place" in caplog.text:
            asked.set()
        return web.Response(text="no JSON") if offer is None else web.json_response(offer, status=status)

    app = web.Application()
    app.router.add_post("/broadcasts", answer)
    async with TestServer(app) as trainer:
        member = BroadcastMember(TOKEN)
        running = asyncio.create_task(
            member.run(StagedServer(Path("none")), lambda: str(trainer.make_url("/broadcasts/1")))
        )
        async with asyncio.timeout(60):
            await asked.wait()
        await cancel_and_wait([running])
    assert (member.received, member.missed) == (0, 0)


async def test_member_pauses_longer_after_each_answer_in_vain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that no broadcast began is as good as any."""
    pauses, statuses, done = RecordedPauses(), [500, 500, 204, 500], asyncio.Event()
    monkeypatch.setattr("penstock.weight_sync.broadcast.member.AGAIN", pauses)

    async def answer(_request: web.Request) -> web.Response:
        if not statuses:
            done.set()
            await asyncio.sleep(60)
        return web.Response(status=statuses.pop(0))

    await run_member(answer, done)
    assert pauses.failures == [1, 2, 1]


async def test_member_of_another_wire_says_so_and_takes_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For a minute: the trainer may be another one by then."""
    monkeypatch.setattr("penstock.weight_sync.broadcast.member.OTHER_WIRE_S", 600.0)
    asked = list[object]()

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.Response(status=409, text="this trainer broadcasts over carrier pigeons")

    refused = asyncio.Event()

    async def watch() -> None:
        await until(lambda: "carrier pigeons" in caplog.text)
        await asyncio.sleep(0.1)
        refused.set()

    watching = asyncio.create_task(watch())
    await run_member(answer, refused)
    await watching
    assert asked == [{"count": 1, "wire": "gloo/1"}]
    assert "no place" not in caplog.text


async def run_member(answer: Callable[[web.Request], Awaitable[web.Response]], until_set: asyncio.Event) -> None:
    app = web.Application()
    app.router.add_post("/broadcasts", answer)
    async with TestServer(app) as trainer:
        member, url = BroadcastMember(TOKEN), str(trainer.make_url("/broadcasts/1"))
        running = asyncio.create_task(member.run(StagedServer(Path("none")), lambda: url))
        async with asyncio.timeout(60):
            await until_set.wait()
        await cancel_and_wait([running])
    assert (member.received, member.missed, member.busy, member.cause) == (0, 0, False, "")


async def test_member_closes_what_fetches_its_files() -> None:
    class Fetched:
        closed = False

        async def __call__(self, manifest: Any, /) -> Any:
            return manifest

        async def close(self) -> None:
            self.closed = True

    fetched = Fetched()
    await StagedFetch(BroadcastMember(TOKEN), fetched).close()
    assert fetched.closed
