"""The backends under attack, each with a neighbour: a session that must notice nothing of what happens beside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
from containers import IMAGE
from leftovers import MAKERS, Maker

from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.make import make_sandbox
from penstock.sandbox.protocol import RunResult, Sandbox, Session
from penstock.sandbox.remote import RemoteSandbox

CONFIG = SandboxConfig(
    max_boxes=6, memory_mb=128, pids=32, cpu_s=1, tmp_mb=16, image=IMAGE, output_bytes=65536, run_timeout_s=30.0
)
"""Small, so that every limit is reached soon."""
SHM_MB = 16
ROOT = Path(__file__).resolve().parents[3]
TOKEN = "correct horse battery"
START_DEADLINE_S = 60.0


@dataclass(slots=True)
class Target:
    backend: str
    sandbox: Sandbox
    neighbour: Session
    server_pid: int | None = None
    server_log: IO[bytes] | None = None
    url: str = ""
    visits: int = 0

    async def visit_neighbour(self) -> None:
        """Its names are what the last visit left: neither it nor its server was restarted or disturbed."""
        self.visits += 1
        result = await self.neighbour.run_python("visits = globals().get('visits', 0) + 1\nvisits")
        assert (result.stdout, result.limit, result.state_lost) == (f"{self.visits}\n", None, False)


@contextlib.asynccontextmanager
async def attacked_backend(backend: str) -> AsyncIterator[Target]:
    """Whoever opens it owns it: every box, the server and the descriptors are gone afterwards."""
    descriptors = open_descriptors(os.getpid())
    async with _target(backend) as target:
        yield target
    assert_no_more_than(descriptors, open_descriptors(os.getpid()))


@contextlib.asynccontextmanager
async def _target(backend: str) -> AsyncIterator[Target]:
    if backend == "remote":
        async with _remote() as target:
            yield target
        return
    owner = f"attacks-{backend}-{os.getpid()}"
    MAKERS.append(Maker(os.getpid(), owner))
    sandbox = make_sandbox(CONFIG.model_copy(update={"backend": backend}), owner)
    try:
        yield Target(backend, sandbox, await sandbox.start("neighbour"))
    finally:
        await sandbox.close()


@contextlib.asynccontextmanager
async def _remote() -> AsyncIterator[Target]:
    """A server process of its own over bwrap, with the host's secret in its environment as a worker's has it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        process = await _start_server(port, log)
        url = f"http://127.0.0.1:{port}"
        MAKERS.append(Maker(process.pid, f"sandbox-{port}"))
        sandbox = RemoteSandbox(CONFIG.model_copy(update={"backend": "remote", "url": url}), url, TOKEN)
        try:
            await _answers(url, process, log)
            yield Target("remote", sandbox, await sandbox.start("neighbour"), process.pid, log, url)
        finally:
            await sandbox.close()
            process.terminate()
            await asyncio.wait_for(process.wait(), 60)


_SERVER = """
import asyncio, sys
from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.server import serve
asyncio.run(serve(SandboxConfig.model_validate_json(sys.argv[1]), "127.0.0.1", int(sys.argv[2]), sys.argv[3]))
"""


async def _start_server(port: int, log: IO[bytes]) -> asyncio.subprocess.Process:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    arguments = (CONFIG.model_dump_json(), str(port), TOKEN)
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", _SERVER, *arguments, env=env, stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL
    )


async def _answers(url: str, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
    async with httpx.AsyncClient() as client, asyncio.timeout(START_DEADLINE_S):
        while True:
            assert process.returncode is None, words_of(log)
            with contextlib.suppress(httpx.TransportError):
                await client.get(f"{url}/health")
                return
            await asyncio.sleep(0.05)


def words_of(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode("utf-8", "replace")


def open_descriptors(pid: int) -> list[str]:
    """What each open descriptor of a process is: ``socket``, ``pipe``, ``/memfd:penstock (deleted)`` ..."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(fd).partition(":[")[0])
    return sorted(found)


def assert_no_more_than(before: list[str], after: list[str]) -> None:
    """A descriptor that one box leaves open is what thousands of episodes die of."""
    more = [kind for kind in set(after) if after.count(kind) > before.count(kind)]
    assert not more, f"descriptors left open: {more}"


async def attack(session: Session, code: str, timeout_s: float = 5.0) -> RunResult:
    return await session.run_python(code, timeout_s=timeout_s)


def ended_by(result: RunResult, limit: str) -> bool:
    """A limit's end as it must look: named, no exit code, and said that names are gone."""
    return (result.exit_code, result.limit, result.state_lost) == (None, limit, True)
