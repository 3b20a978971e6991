"""Fake boxes for unit tests of what hands them out: they are counted and can be made to die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from penstock.sandbox.protocol import BoxNeeds, Output, RunResult, SandboxError, SandboxLost


class FakeSession:
    """Echoes its argv; after `die` every call raises `SandboxLost`."""

    def __init__(self, sandbox: FakeSandbox, session_id: str, image: str | None) -> None:
        self.session_id = session_id
        self.image = image
        self.dead = False
        self.closed = False
        self._sandbox = sandbox

    async def run(
        self, argv: list[str], *, stdin: str = "", timeout_s: float | None = None, cwd: str | None = None
    ) -> RunResult:
        await asyncio.sleep(0)
        if self.dead or self.closed:
            raise SandboxLost(f"{self.session_id} is gone")
        return RunResult(" ".join(argv), "", 0)

    async def stream(
        self, argv: list[str], *, stdin: str = "", timeout_s: float | None = None, cwd: str | None = None
    ) -> AsyncIterator[Output]:
        result = await self.run(argv)
        yield Output("stdout", result.stdout)
        yield Output("stdout", "", result)

    async def run_python(self, code: str, *, timeout_s: float | None = None) -> RunResult:
        return await self.run(["python", code])

    async def run_shell(self, command: str, *, timeout_s: float | None = None) -> RunResult:
        return await self.run(["shell", command])

    async def write_file(self, path: str, data: bytes) -> None:
        await self.run(["write", path])

    async def read_file(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        raise FileNotFoundError(2, "No such file or directory", path)

    async def leave(self) -> None:
        await self.close()

    async def close(self) -> None:
        await asyncio.sleep(0)
        if not self.closed:
            self.closed = True
            self._sandbox.living.discard(self)


class FakeSandbox:
    """`most` is the highest number of boxes that ever lived at once."""

    containment = "fake: none"

    def __init__(self) -> None:
        self.living: set[FakeSession] = set()
        self.started = 0
        self.most = 0
        self.failures = 0
        """Number of further starts that fail."""
        self.start_s = 0.0
        self.broken_images: set[str | None] = set()

    def check_needs(self, needs: BoxNeeds) -> None:
        """Any."""

    async def start(self, label: str, *, image: str | None = None, needs: BoxNeeds | None = None) -> FakeSession:
        self.started += 1
        session = FakeSession(self, f"box-{self.started}", image)
        self.living.add(session)  # a box counts from the moment its start begins
        self.most = max(self.most, len(self.living))
        try:
            await asyncio.sleep(self.start_s)
            if self.failures > 0:
                self.failures -= 1
                raise SandboxError("no box today")
            if image in self.broken_images:
                raise SandboxError(f"no box of {image}")
        except BaseException:
            self.living.discard(session)
            raise
        return session

    async def attach(self, session_id: str) -> FakeSession:
        match = next((session for session in self.living if session.session_id == session_id), None)
        if match is None:
            raise SandboxLost(f"no session {session_id}")
        return match

    async def close(self) -> None:
        for session in list(self.living):
            await session.close()
