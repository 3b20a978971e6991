"""A `penstock sandbox` process on loopback, for who measures or attacks it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import IO

from benchmarks.support.child import ROOT
from penstock.sandbox import SandboxConfig, SandboxError

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class SandboxServer:
    pid: int
    port: int
    url: str
    token: str


@contextlib.asynccontextmanager
async def sandbox_server(
    config: SandboxConfig, token: str, log: IO[bytes] | None = None
) -> AsyncIterator[SandboxServer]:
    """Boxes of bubblewrap with the other settings of `config`; `log`: where it writes (None: this process's stderr).

    Raises:
        SandboxError: it ended instead of listening.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings = config.model_dump(exclude_defaults=True, exclude={"backend", "url"}, mode="json")
    command = [sys.executable, "-m", "penstock.deploy.cli", "sandbox", "--port", str(port)]
    process = await asyncio.create_subprocess_exec(
        *command,
        *(f"sandbox.{key}={value}" for key, value in settings.items()),
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PENSTOCK_TOKEN": token},
        stdin=subprocess.DEVNULL,
        stdout=log or subprocess.DEVNULL,
        stderr=log,
    )
    try:
        await _listening(port, process)
        yield SandboxServer(process.pid, port, f"http://127.0.0.1:{port}", token)
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), STOP_DEADLINE_S)


async def _listening(port: int, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(START_DEADLINE_S):
        while not _accepts(port):
            if process.returncode is not None:
                raise SandboxError(f"the sandbox server ended with {process.returncode}")
            await asyncio.sleep(0.05)


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
