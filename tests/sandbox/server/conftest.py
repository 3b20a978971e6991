"""Real servers on real sockets with real boxes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest_asyncio
from tests.ports import free_port

from penstock.sandbox import RemoteSandbox, SandboxConfig
from penstock.sandbox.server import serve

TOKEN = "correct horse"
OTHER = "battery staple"
CONFIG = SandboxConfig(max_boxes=4, run_timeout_s=60.0)
Start = Callable[..., Any]
UNTIL_GO = ["sh", "-c", "while [ ! -e /gate/go ]; do sleep 0.05; done"]
"""Of a box that is `gated`."""


def gated(config: SandboxConfig, folder: Path) -> SandboxConfig:
    """Returns `config` with boxes that see `folder` as /gate: a file `go` in it ends what waits for it there."""
    folder.chmod(0o755)
    return config.model_copy(update={"folders": {"/gate": str(folder)}})


def headers(token: str = TOKEN) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def answers(url: str, deadline_s: float = 60.0) -> None:
    async with httpx.AsyncClient() as client, asyncio.timeout(deadline_s):
        while True:
            with contextlib.suppress(httpx.TransportError):
                await client.get(f"{url}/health")
                return
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def serving(config: SandboxConfig = CONFIG) -> AsyncIterator[str]:
    port = free_port()
    server = asyncio.create_task(serve(config, "127.0.0.1", port, TOKEN))
    url = f"http://127.0.0.1:{port}"
    try:
        await answers(url)
        yield url
    finally:
        server.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await server  # where it could not start, this says why


@pytest_asyncio.fixture
async def url() -> AsyncIterator[str]:
    async with serving() as address:
        yield address


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    """config → the URL of a server of its own."""
    async with contextlib.AsyncExitStack() as stack:

        async def one(config: SandboxConfig) -> str:
            return await stack.enter_async_context(serving(config))

        yield one


@pytest_asyncio.fixture
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, headers=headers(), timeout=60) as made:
        yield made


@pytest_asyncio.fixture
async def remote(url: str) -> AsyncIterator[RemoteSandbox]:
    made = remote_of(url)
    yield made
    await made.close()


def remote_of(url: str, token: str = TOKEN, ttl_s: float = 60.0) -> RemoteSandbox:
    return RemoteSandbox(SandboxConfig(backend="remote", url=url, run_timeout_s=60.0), url, token, ttl_s)
