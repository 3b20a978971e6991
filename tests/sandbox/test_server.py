from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.make import make_sandbox
from penstock.sandbox.protocol import SandboxError, SandboxLost
from penstock.sandbox.remote import RemoteSandbox
from penstock.sandbox.server import build_app, serve

pytestmark = pytest.mark.bwrap
TOKEN = "correct horse"


@pytest_asyncio.fixture
async def url() -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = asyncio.create_task(serve(SandboxConfig(max_boxes=4), "127.0.0.1", port, TOKEN))
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient() as client:
        for _ in range(200):
            with contextlib.suppress(httpx.TransportError):
                await client.get(f"{url}/health")
                break
            await asyncio.sleep(0.02)
    yield url
    server.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await server


def remote(url: str, token: str = TOKEN, ttl_s: float = 60.0) -> RemoteSandbox:
    return RemoteSandbox(SandboxConfig(backend="remote", url=url, run_timeout_s=2.0), url, token, ttl_s)


async def test_a_session_over_http_outlives_its_opener(url: str) -> None:
    first = remote(url)
    session = await first.start("run/episode 1")
    await session.run_python("x = 41")
    await session.write_file("a b.bin", b"\x00\xff")
    await first.close()

    second = remote(url)
    again = await second.attach(session.session_id)
    assert (await again.run_python("x + 1")).stdout == "42\n"
    assert await again.read_file("a b.bin") == b"\x00\xff"
    stopped = await again.run(["sleep", "60"], timeout_s=0.2)
    assert (stopped.limit, stopped.exit_code) == ("wall", None)
    await again.close()
    with pytest.raises(SandboxLost):
        await again.run_python("x")
    with pytest.raises(SandboxLost):
        await second.attach(session.session_id)
    await second.close()


async def test_errors_keep_their_kind(url: str) -> None:
    sandbox = remote(url)
    session = await sandbox.start("errors")
    assert (await session.run_python("1 / 0")).exit_code == 1
    with pytest.raises(FileNotFoundError):
        await session.read_file("../../etc/shadow")
    with pytest.raises(SandboxError, match="timeout_s"):
        await session.run_python("1", timeout_s=-1.0)
    await sandbox.close()
    nowhere = remote("http://127.0.0.1:9")
    with pytest.raises(SandboxError, match=r"127\.0\.0\.1:9"):
        await nowhere.start("x")
    await nowhere.close()


async def test_every_route_needs_the_token(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        for method, path in (("GET", "/health"), ("POST", "/sessions"), ("DELETE", "/sessions/x"), ("GET", "/docs")):
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                answer = await client.request(method, path, headers=headers)
                assert answer.status_code in (401, 404)
                assert path == "/docs" or answer.status_code == 401
    sandbox = remote(url, token="wrong")
    with pytest.raises(SandboxError, match="refuses this token"):
        await sandbox.start("x")
    await sandbox.close()


async def test_an_unused_session_is_ended_after_its_time(url: str) -> None:
    sandbox = remote(url, ttl_s=0.3)
    session = await sandbox.start("forgotten")
    async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        assert (await client.get("/health")).json()["sessions"] == 1
        await asyncio.sleep(1.8)
        assert (await client.get("/health")).json()["sessions"] == 0
    with pytest.raises(SandboxLost):
        await session.run_python("1")
    await sandbox.close()


async def test_a_taken_port_and_an_empty_token_are_clear_errors(url: str) -> None:
    with pytest.raises(SandboxError, match="choose another"):
        await serve(SandboxConfig(), "127.0.0.1", int(url.rpartition(":")[2]), TOKEN)
    unsafe = make_sandbox(SandboxConfig(backend="unsafe_subprocess"), "tests")
    with pytest.raises(ValueError, match="token"):
        build_app(unsafe, "", 1)
    await unsafe.close()
