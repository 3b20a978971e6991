"""The backends under attack, each with a neighbour: a session that must notice nothing of what happens beside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
from tests.sandbox.containers import IMAGE
from tests.sandbox.orphans import MAKERS, Maker

from benchmarks.support.boxes import sandbox_server
from penstock.sandbox import RunResult, Sandbox, SandboxConfig, Session, make_sandbox
from penstock.sandbox.bwrap.sandbox import BwrapSandbox

CONFIG = SandboxConfig(
    max_boxes=5, memory_mb=128, pids=32, cpu_s=1, tmp_mb=16, image=IMAGE, output_bytes=65536, run_timeout_s=30.0
)
"""Small, so that every limit is reached soon."""
SHM_MB = 16
WITHOUT_ZYGOTE = "bwrap without zygote"
"""Each box by a bubblewrap and an interpreter of its own, as on machines where boxes cannot be forked."""
TOKEN = "correct horse battery"


@dataclass(slots=True)
class Target:
    backend: str
    sandbox: Sandbox
    neighbour: Session
    url: str = ""
    """Of the server, where there is one."""
    visits: int = 0

    @property
    def counts_memory(self) -> bool:
        """No cgroup limits these boxes: their first process counts, and what cannot be counted is refused."""
        return self.backend != "docker" and "memory counted" in BwrapSandbox(CONFIG, "walls").containment

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
    await assert_closed(descriptors, os.getpid())


@contextlib.asynccontextmanager
async def _target(backend: str) -> AsyncIterator[Target]:
    if backend == "remote":
        async with _remote() as target:
            yield target
        return
    owner = f"attacks-{backend.replace(' ', '-')}-{os.getpid()}"
    MAKERS.append(Maker(os.getpid(), owner))
    with _zygotes_refused() if backend == WITHOUT_ZYGOTE else contextlib.nullcontext():
        sandbox = make_sandbox(CONFIG.model_copy(update={"backend": backend.split(maxsplit=1)[0]}), owner)
    try:
        yield Target(backend, sandbox, await sandbox.start("neighbour"))
    finally:
        await sandbox.close()


@contextlib.contextmanager
def _zygotes_refused() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.sandbox.bwrap.sandbox.why_no_zygote", lambda *_: "a test says so")
        yield


@contextlib.asynccontextmanager
async def _remote() -> AsyncIterator[Target]:
    """A server process of its own over bwrap, with the host's secret in its environment as a worker's has it."""
    with tempfile.TemporaryFile() as log:
        async with sandbox_server(CONFIG, TOKEN, log) as server:
            MAKERS.append(Maker(server.pid, f"sandbox-{server.port}"))
            config = CONFIG.model_copy(update={"backend": "remote", "url": server.url})
            sandbox = make_sandbox(config, "attacks", TOKEN)
            try:
                neighbour = await sandbox.start("neighbour")
                descriptors = open_descriptors(server.pid)
                yield Target("remote", sandbox, neighbour, server.url)
            finally:
                await sandbox.close()
            await assert_closed(descriptors, server.pid)
        words = words_of(log)
    assert "Traceback" not in words, words
    assert "\x1b" not in words, "what code wrote reached the server's own terminal"


def words_of(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode("utf-8", "replace")


def open_descriptors(pid: int) -> list[str]:
    """What each open descriptor of a process is: ``socket``, ``pipe``, ``/memfd:penstock (deleted)`` ...

    Without the locks of uids, which a process keeps.
    """
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(fd).partition(":[")[0])
    return sorted(one for one in found if "/penstock-uids-" not in one)


async def assert_closed(before: list[str], pid: int) -> None:
    """A descriptor that one box leaves open is what thousands of episodes die of. Connections take a moment to end."""
    for _ in range(600):
        now = open_descriptors(pid)
        more = [kind for kind in set(now) if now.count(kind) > before.count(kind)]
        if not more:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"descriptors left open: {more}")


async def attack(session: Session, code: str, timeout_s: float = 30.0) -> RunResult:
    return await session.run_python(code, timeout_s=timeout_s)


def ended_by(result: RunResult, limit: str) -> bool:
    """A limit's end as it must look: named, no exit code, and said that names are gone."""
    return (result.exit_code, result.limit, result.state_lost) == (None, limit, True)
