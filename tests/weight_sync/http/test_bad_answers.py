"""Answers of another form than expected: they stop no server that fetches, and no member of a broadcast."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from tests.until import until
from tests.weight_sync.conftest import TOKEN, OpenRoute, file_of, parts_of, small_tensors

torch = pytest.importorskip("torch")

from penstock.weight_sync import (
    Broadcaster,
    Downloader,
    FileServer,
    WeightPublisher,
    WeightsRefused,
)
from penstock.weight_sync.http.scheduler import TURN_S

pytestmark = pytest.mark.torch
BEARER = {"Authorization": f"Bearer {TOKEN}"}


# over HTTP -----------------------------------------------------------------------------------------------------------


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
