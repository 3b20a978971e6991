"""The page as a process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from penstock.dashboard.access import Tokens
from penstock.dashboard.app import make_app
from penstock.dashboard.live import LiveQueues

LAST_CALLS_S = 5


class CannotListen(Exception):
    """The address or port is not to be had; the message says what to choose."""


async def serve(
    runs_dir: Path, queues: LiveQueues, tokens: Tokens, *, host: str, port: int, say: Callable[[str], None]
) -> None:
    """Until cancelled or told by SIGTERM; `say` gets the address once it listens. Raises `CannotListen`."""
    listener = _listen(host, port)
    settings = uvicorn.Config(
        make_app(runs_dir, queues, tokens),
        log_level="warning",
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=LAST_CALLS_S,
    )
    server = uvicorn.Server(settings)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    say(f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/")
    try:
        await asyncio.shield(task)
    finally:
        server.should_exit = True
        await task
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise CannotListen(f"port {port} on {host}: {error.strerror}; choose another, or 0 for a free one") from error
