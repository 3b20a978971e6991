"""From settings to a listening server, until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket

import uvicorn

from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.make import make_sandbox
from penstock.sandbox.protocol import SandboxError
from penstock.sandbox.server.app import build_app
from penstock.sandbox.server.callers import callers_of

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""Longer than the client's: see `remote_http.KEEP_ALIVE_S`."""
LAST_CALLS_S = 5
"""Calls in progress when the server is told to stop may take this long; their boxes end then."""


async def serve(config: SandboxConfig, host: str, port: int, token: str, metrics_token: str = "") -> None:
    """Until cancelled or told by SIGTERM; every box is ended then. `metrics_token` opens ``/metrics`` alone.

    What a killed server on the same port left is cleared away first: its boxes are named after the port.

    Raises:
        SandboxError: no box can be made here, the port is taken, or a token is missing.
    """
    if config.backend == "remote":
        raise SandboxError("a sandbox server holds boxes itself: sandbox.backend must be bwrap or docker")
    callers = callers_of(config, token, os.environ)
    listener = _listen(host, port)
    bound = listener.getsockname()[1]
    app = build_app(make_sandbox(config, f"sandbox-{bound}"), config, callers, metrics_token)
    settings = uvicorn.Config(
        app,
        log_level="warning",
        lifespan="on",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_CALLS_S,
    )
    server = uvicorn.Server(settings)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    logger.info("sandbox server on http://%s:%d", host, bound)
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
        raise SandboxError(f"port {port} on {host} is in use or not ours: {error.strerror}; choose another") from error
