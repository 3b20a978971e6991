"""A sandbox whose calls are OpenTelemetry spans under the tool that makes them. Only where spans are on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, cast

from penstock.agent_loops.trace import exported_span
from penstock.rollout_server import TRACING
from penstock.sandbox import Sandbox, Session

WORK = frozenset({"run", "run_python", "run_shell", "write_file", "read_file", "close", "leave"})
"""Verbs of a session that are awaited; a stream is its reader's own time."""


def traced(sandbox: Sandbox) -> Sandbox:
    """The same sandbox, told about where spans are on."""
    return sandbox if TRACING.tracer is None else cast(Sandbox, TracedSandbox(sandbox))


class _Around:
    """Everything else is as it is."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class TracedSandbox(_Around):
    async def start(self, label: str, *, image: str | None = None) -> Session:
        with exported_span("sandbox", "start"):
            return cast(Session, TracedSession(await self._inner.start(label, image=image)))

    async def attach(self, session_id: str) -> Session:
        with exported_span("sandbox", "attach"):
            return cast(Session, TracedSession(await self._inner.attach(session_id)))


class TracedSession(_Around):
    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return _timed(name, found) if name in WORK else found


def _timed(verb: str, work: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @wraps(work)
    async def call(*args: Any, **kwargs: Any) -> Any:
        with exported_span("sandbox", verb):
            return await work(*args, **kwargs)

    return call
