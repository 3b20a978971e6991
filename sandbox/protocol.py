"""A box for code that nobody trusts: five verbs, whatever holds the walls up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class SandboxError(Exception):
    """The box itself failed (could not start, vanished, broke its protocol): an ``infra_error``, never a reward."""


class SandboxLost(SandboxError):
    """The session does not exist any more."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What code did. Code that failed is an observation, not an error of ours."""

    stdout: str
    stderr: str
    exit_code: int | None
    """None where it was killed by a limit."""
    limit: str | None = None
    """``wall``, ``cpu``, ``memory`` or ``output`` where a limit ended or cut it."""
    duration_s: float = 0.0
    state_lost: bool = False
    """The interpreter (or the whole box) had to be ended: names that earlier `run_python` calls defined are gone."""


class Session(Protocol):
    """One living box. The caller that started it closes it."""

    session_id: str

    async def run(self, argv: list[str], *, stdin: str = "", timeout_s: float | None = None) -> RunResult:
        """Run a command to its end inside the box. Raises `SandboxError`."""

    async def run_python(self, code: str, *, timeout_s: float | None = None) -> RunResult:
        """Run code in the session's own interpreter: names defined by one call are there in the next."""

    async def write_file(self, path: str, data: bytes) -> None:
        """Replace or make a file; `path` is the box's (relative to its /tmp). Raises `OSError` as open() would."""

    async def read_file(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """At most the first `max_bytes` of a regular file. Raises `OSError` as open() would."""

    async def close(self) -> None:
        """End everything in the box; safe to call twice."""


class Sandbox(Protocol):
    """A maker of boxes, one per worker process or sandbox server."""

    async def start(self, label: str) -> Session:
        """A fresh box; `label` (run and episode) marks it for reaping. Raises `SandboxError`."""

    async def attach(self, session_id: str) -> Session:
        """A box that another process opened. Raises `SandboxLost` where it is gone or cannot outlive its opener."""

    async def close(self) -> None:
        """Close every box of this maker."""
