"""What is particular to weights over HTTP: the token, cut connections, what is fetched and what is not."""

from __future__ import annotations

import asyncio
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.ports import free_port
from tests.until import until
from tests.weight_sync.conftest import (
    TOKEN,
    OpenRoute,
    altered,
    file_of,
    next_version,
    parts_of,
    reorder_header,
    small_tensors,
)
from tests.weight_sync.http.http_parts import cutting_proxy

torch = pytest.importorskip("torch")

from penstock.common import Backoff
from penstock.weight_sync import (
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


@pytest.fixture
async def server(tmp_path: Path) -> Any:
    serving = FileServer(tmp_path / "published", TOKEN, port=free_port())
    await serving.start()
    yield serving
    await serving.stop()


def publish(folder: Path, url: str, version: int = 1) -> dict[str, Any]:
    tensors = small_tensors()
    return WeightPublisher(folder / "published", "http", base_url=url).write(version, tensors.items())


async def test_ranges_and_nothing_but_published_files(tmp_path: Path, server: FileServer) -> None:
    manifest = publish(tmp_path, server.url)
    (tmp_path / "published" / "notes.txt").write_text("not for others")
    whole = (tmp_path / "published" / "weights-00000001.safetensors").read_bytes()
    async with httpx.AsyncClient(headers=BEARER, timeout=60) as client:
        assert (await client.get(manifest.place)).content == whole
        part = await client.get(manifest.place, headers={"Range": "bytes=1000-"})
        assert (part.status_code, part.content) == (206, whole[1000:])
        for name in ("notes.txt", "weights-00000002.safetensors", "..%2Fnotes.txt", "", "a/b"):
            assert (await client.get(f"{server.url}/{name}")).status_code == 404
        assert (await client.put(manifest.place, content=b"x")).status_code == 400
        holder = {"Penstock-Serves": "http://127.0.0.1:9"}
        assert (await client.put(manifest.place, headers=holder)).status_code == 204
        for method in ("POST", "DELETE"):
            assert (await client.request(method, manifest.place, content=b"x")).status_code == 405
    assert (tmp_path / "published" / "weights-00000001.safetensors").read_bytes() == whole


@pytest.mark.parametrize("given", [{}, {"Authorization": "Bearer other"}, {"Authorization": TOKEN}])
async def test_without_the_token_nothing_is_said(tmp_path: Path, server: FileServer, given: dict[str, str]) -> None:
    manifest = publish(tmp_path, server.url)
    async with httpx.AsyncClient(headers=given, timeout=60) as client:
        for url in (manifest.place, f"{server.url}/weights-00000009.safetensors", f"{server.url}/x/y"):
            assert (await client.get(url)).status_code == 401
    downloader = Downloader(tmp_path / "s0", "another token", stall_s=20)
    with pytest.raises(WeightsUnreachable, match="401 the run's token is needed"):
        await asyncio.to_thread(downloader.localise, manifest)
    assert downloader.bytes_received["trainer"] == 0


async def test_a_cut_connection_goes_on_from_what_is_there(tmp_path: Path, server: FileServer) -> None:
    async with cutting_proxy(server.url, 50_000, 1, 0, 30_000) as proxy:
        manifest = publish(tmp_path, proxy.url)
        downloader = Downloader(tmp_path / "s0", TOKEN, stall_s=20)
        local = await asyncio.to_thread(downloader.localise, manifest)
    assert proxy.ranges == [0, 50_000, 50_001, 50_001, 80_001]
    assert downloader.bytes_received["trainer"] == manifest.bytes
    assert torch.equal(read_verified(local)["embed"], small_tensors()["embed"])


@pytest.mark.parametrize(
    ("cuts", "comes"),
    [([0] * 4, True), ([0] * 5, False), ([0] * 4 + [10] + [0] * 4, True)],
    ids=["four", "five", "four-twice"],
)
async def test_five_connections_that_bring_nothing_are_given_up(
    tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch, cuts: list[int], comes: bool
) -> None:
    """In a row: one that brings something is a new beginning."""
    monkeypatch.setattr("penstock.weight_sync.http.client.RECONNECT", Backoff(0.001))
    async with cutting_proxy(server.url, *cuts) as proxy:
        manifest = publish(tmp_path, proxy.url)
        downloader = Downloader(tmp_path / "s0", TOKEN, stall_s=60)
        if comes:
            read_verified(await asyncio.to_thread(downloader.localise, manifest))
        else:
            with pytest.raises(WeightsUnreachable, match=r"weights-00000001.*: 0 of \d+ bytes"):
                await asyncio.to_thread(downloader.localise, manifest)
        assert len(proxy.ranges) == len(cuts) + comes


async def test_a_server_that_was_killed_goes_on_from_what_its_disk_has(tmp_path: Path, server: FileServer) -> None:
    """Two downloaders on one folder, one after the other: nothing of the first but its files is left."""
    async with cutting_proxy(server.url, 50_000, *[0] * 20) as proxy:
        manifest = publish(tmp_path, proxy.url)
        with pytest.raises(WeightsUnreachable, match=r"50000 of \d+ bytes.*ended early.*given up after 5 attempts"):
            await asyncio.to_thread(Downloader(tmp_path / "s0", TOKEN, stall_s=20).localise, manifest)
    url = f"{server.url}/weights-00000001.safetensors"  # the trainer came back, too
    elsewhere = altered(manifest, lambda plain: plain.update(url=url))
    second = Downloader(tmp_path / "s0", TOKEN, stall_s=20)
    read_verified(await asyncio.to_thread(second.localise, elsewhere))
    assert second.bytes_received["trainer"] == manifest.bytes - 50_000


async def test_nobody_there_and_no_time_are_said(tmp_path: Path, server: FileServer) -> None:
    manifest = publish(tmp_path, server.url)
    await server.stop()
    with pytest.raises(WeightsUnreachable, match=r"ConnectionRefused.*given up after 5"):
        await asyncio.to_thread(Downloader(tmp_path / "s0", TOKEN).localise, manifest)
    with pytest.raises(WeightsUnreachable, match=r"ConnectionRefused.*not done in time"):
        await asyncio.to_thread(Downloader(tmp_path / "s0", TOKEN, stall_s=0).localise, manifest)


async def test_closing_breaks_off_and_leaves_nothing(tmp_path: Path, server: FileServer) -> None:
    before = set(threading.enumerate())
    async with cutting_proxy(server.url, 50_000, *[0] * 20) as proxy:
        manifest = publish(tmp_path, proxy.url)
        downloader = Downloader(tmp_path / "s0", TOKEN)
        fetching = asyncio.create_task(asyncio.to_thread(downloader.localise, manifest))
        while not proxy.ranges[1:]:
            await asyncio.sleep(0.01)
        downloader.close()
        with pytest.raises(WeightsUnreachable, match="this server stops"):
            await fetching
    assert not (tmp_path / "s0").exists()
    assert len(set(threading.enumerate()) - before) < 10, "those of the loop alone"


async def test_each_file_comes_once_and_goes_with_its_chain(open_route: OpenRoute, tmp_path: Path) -> None:
    route = await open_route("http", full_every=3)
    tensors, manifests = small_tensors(), []
    for version in range(1, 6):
        tensors = next_version(tensors, version)
        manifests.append(route.publish(version, tensors))
        await asyncio.to_thread(route.receive, manifests[-1])
    downloader, reader = route.downloaders["s0"], route.readers["s0"]
    assert downloader.bytes_received["trainer"] == reader.bytes_read == sum(manifest.bytes for manifest in manifests)
    assert sorted(path.name[17:] for path in (tmp_path / "s0").iterdir()) == [
        "weights-00000004.safetensors",
        "weights-00000005.delta.safetensors",
    ]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/../etc/passwd", "http://127.0.0.1:1/", "weights-1"])
async def test_an_announcement_cannot_write_elsewhere(tmp_path: Path, server: FileServer, url: str) -> None:
    manifest = publish(tmp_path, server.url)
    for wrong in ({"url": url}, {"xxh3": "../../escape"}):
        with pytest.raises(WeightsRefused, match="is not a published file"):
            Downloader(tmp_path / "s0", TOKEN).localise(
                altered(manifest, lambda plain, wrong=wrong: plain.update(wrong))
            )


async def test_a_file_that_is_not_the_announced_one_is_not_kept(tmp_path: Path, server: FileServer) -> None:
    manifest = publish(tmp_path, server.url)
    path = tmp_path / "published" / "weights-00000001.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"BF16"', b'"F16" '))
    downloader = Downloader(tmp_path / "s0", TOKEN)
    with pytest.raises(WeightsRefused, match="its header is damaged"):
        await asyncio.to_thread(downloader.localise, manifest)
    assert list((tmp_path / "s0").iterdir()) == []
    path.write_bytes(whole)
    read_verified(await asyncio.to_thread(downloader.localise, manifest))


@pytest.mark.parametrize("which", [0, 1], ids=["full", "delta"])
async def test_a_file_of_other_bytes_is_named_whatever_it_is(open_route: OpenRoute, which: int) -> None:
    """They mean the same, so that no tensor is to blame."""
    route = await open_route("http", full_every=4)
    tensors = small_tensors()
    manifests = [route.publish(1, tensors), route.publish(2, next_version(tensors, 2))]
    assert manifests[1].base_version == 1
    reorder_header(route.file(manifests[which]))
    with pytest.raises(WeightsRefused, match=rf"version {which + 1}: .*weights-0000000{which + 1}.*: .*header"):
        await asyncio.to_thread(route.receive, manifests[which])


@pytest.mark.parametrize(("checksums", "problem"), [(None, "its header is damaged"), ("{}", r"KeyError\('embed'\)")])
async def test_file_whose_header_lacks_its_checksums_is_refused(
    tmp_path: Path, open_route: OpenRoute, checksums: str | None, problem: str
) -> None:
    route = await open_route("http")
    manifest = route.publish(1, small_tensors())
    header, data = parts_of(route.file(manifest))
    del header["__metadata__"]["xxh3"]
    header["__metadata__"] |= {"xxh3": checksums} if checksums else {}
    other = file_of(header, data)
    route.file(manifest).write_bytes(other)
    manifest = replace(manifest, files=(replace(manifest.files[-1], bytes=len(other)),))
    with pytest.raises(WeightsRefused, match=f"its header is damaged.*{problem}|{problem}$"):
        await asyncio.to_thread(Downloader(tmp_path / "s0", TOKEN).localise, manifest)


async def test_answer_that_broke_off_gives_its_turn_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server dies while it fetches: the next one does not wait until the turn would have ended."""
    monkeypatch.setattr("penstock.weight_sync.http.scheduler.TURN_S", 3600.0)
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
        async with asyncio.timeout(200):
            while (await client.get(manifest.place, headers={"Range": "bytes=0-9"})).status_code == 503:
                await asyncio.sleep(0.05)
    await server.stop()


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
        place = {"count": 1, "wire": "gloo/2"}
        waiting = asyncio.create_task(client.post(f"{server.url}/broadcasts", json=place))
        await until(lambda: broadcaster.parked == 1)
        await server.stop()
        assert (await waiting).status_code == 204
