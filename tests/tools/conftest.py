from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest_asyncio
import uvicorn

Serve = Callable[[Any], Any]


@contextlib.asynccontextmanager
async def _serving(app: Any) -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    async with asyncio.timeout(60):
        while not server.started:
            await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Serve]:
    """ASGI app → its URL, on a real socket until the test ends."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(app: Any) -> str:
            return await stack.enter_async_context(_serving(app))

        yield start
