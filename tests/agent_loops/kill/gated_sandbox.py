"""Real boxes behind a gate: a held call has had its effect in its box, but whoever asked is not told yet.

Sessions also keep a record, on the host, of every piece of code that was run in them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from penstock.sandbox import RunResult, Sandbox, Session

HELD = "# held"
"""Code that ends so is held behind the gate."""


class GatedSandbox:
    def __init__(self, inner: Sandbox) -> None:
        self.containment = "gated"
        self.executed: Counter[tuple[str, str]] = Counter()
        """(session, code) → times that it was run."""
        self.held = 0
        self.open = asyncio.Event()
        self._inner = inner

    async def start(self, label: str, *, image: str | None = None) -> GatedSession:
        return GatedSession(self, await self._inner.start(label, image=image))

    async def attach(self, session_id: str) -> GatedSession:
        return GatedSession(self, await self._inner.attach(session_id))

    async def close(self) -> None:
        await self._inner.close()


class GatedSession:
    def __init__(self, sandbox: GatedSandbox, inner: Session) -> None:
        self.session_id = inner.session_id
        self._sandbox = sandbox
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def run_python(self, code: str, *, timeout_s: float | None = None) -> RunResult:
        self._sandbox.executed[self.session_id, code] += 1
        result = await self._inner.run_python(code, timeout_s=timeout_s)
        if code.endswith(HELD):
            self._sandbox.held += 1
            try:
                await self._sandbox.open.wait()
            finally:
                self._sandbox.held -= 1
        return result
