"""Files and whole folders in and out, as bytes."""

from __future__ import annotations

import asyncio
import gzip
import io
import tarfile

import httpx
import pytest
import pytest_asyncio
from tests.sandbox.server.conftest import TOKEN

from penstock.sandbox import RemoteSandbox, put_folder
from penstock.sandbox.harbor import packed
from penstock.sandbox.remote import RemoteSession
from penstock.sandbox.session import MAX_FILE_BYTES, get_folder

pytestmark = pytest.mark.bwrap


@pytest_asyncio.fixture
async def session(remote: RemoteSandbox) -> RemoteSession:
    return await remote.start("files")


def files_in(tar: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        return {entry.name: archive.extractfile(entry).read() for entry in archive if entry.isfile()}  # type: ignore[union-attr]


async def test_folder_folder_goes_in_and_comes_out(client: httpx.AsyncClient, session: RemoteSession) -> None:
    path = f"/sessions/{session.session_id}/folder"
    files = {"a b.txt": b"1", "deep/er/c.bin": bytes(range(256)) * 100, "-x": b""}
    put = await client.put(path, params={"path": "new/place"}, content=gzip.compress(packed(None, files)))
    assert put.status_code == 204, put.text
    assert (await session.run(["cat", "a b.txt"], cwd="new/place")).stdout == "1"
    got = await client.get(path, params={"path": "new/place"})
    assert got.headers["content-type"] == "application/octet-stream"
    assert files_in(got.content) == {f"./{name}": data for name, data in files.items()}
    assert (await session.run(["ls", "-A"])).stdout == "new\n"  # no archive is left
    assert files_in((await client.get(path, params={"path": "."})).content).keys() == {
        f"./new/place/{name}" for name in files
    }


async def test_folder_same_over_any_session(session: RemoteSession) -> None:
    await put_folder(session, "/tmp/x", packed(None, {"f": b"data"}))
    assert files_in(await get_folder(session, "x")) == {"./f": b"data"}


async def test_folder_errors_carry_their_errno(client: httpx.AsyncClient, session: RemoteSession) -> None:
    path = f"/sessions/{session.session_id}/folder"
    missing = await client.get(path, params={"path": "nothing"})
    assert (missing.status_code, missing.json()["error"]["errno"]) == (409, 2)
    broken = await client.put(path, params={"path": "x"}, content=b"this is no tar")
    assert (broken.status_code, broken.json()["error"]["errno"]) == (409, 22)
    denied = await client.put(path, params={"path": "/usr/x"}, content=packed(None, {"f": b""}))
    assert denied.status_code == 409
    await session.run_python("open('big', 'wb').write(bytes(3_000_000))")
    large = await client.get(path, params={"path": ".", "max_bytes": 100_000})
    assert (large.status_code, large.json()["error"]["errno"]) == (409, 27)
    assert (await session.run(["ls", "-A"])).stdout == "big\nx\n"


async def test_folder_tar_that_climbs_out_stays_in_the_box(client: httpx.AsyncClient, session: RemoteSession) -> None:
    tar = packed(None, {"../../etc/evil": b"x", "/etc/evil": b"x", "ok": b"1"})
    await client.put(f"/sessions/{session.session_id}/folder", params={"path": "in"}, content=tar)
    assert (await session.run(["ls", "/etc"])).stdout.count("evil") == 0


async def test_folder_body_that_is_too_long_is_refused(client: httpx.AsyncClient, session: RemoteSession) -> None:
    path = f"/sessions/{session.session_id}/files"

    async def endless() -> object:
        for _ in range((MAX_FILE_BYTES >> 20) + 1):
            yield bytes(1 << 20)

    refused = await client.put(path, params={"path": "f"}, content=endless())  # type: ignore[arg-type]
    assert refused.status_code == 413
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    head = f"POST /run_code HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {1 << 40}\r\n\r\n"
    writer.write(head.encode())
    assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 413")
    writer.close()
    assert (await session.run_python("1")).stdout == "1\n"
