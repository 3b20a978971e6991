"""A program's end where the engine's connection breaks under it; no engine is needed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

pytest.importorskip("aiodocker")

from penstock.sandbox import SandboxError
from penstock.sandbox.docker.exec_session import Program


class BreakingStream:
    """As aiodocker's, of a connection that is reset after the first output."""

    def __init__(self) -> None:
        self._left = [SimpleNamespace(stream=1, data=b"half of it")]

    async def __aenter__(self) -> BreakingStream:
        return self

    async def read_out(self) -> Any:
        await asyncio.sleep(0)
        if not self._left:
            raise aiohttp.ClientOSError(104, "Connection reset by peer")
        return self._left.pop()

    async def close(self) -> None:
        raise AssertionError  # what `assert response.connection is not None` says of it


class BrokenContainer:
    alive = True

    async def prepare(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(start=BreakingStream)


async def test_program_connection_that_breaks_is_failure_of_sandbox() -> None:
    with pytest.raises(SandboxError, match=r"hearing what a program in a box says.*Connection reset"):
        await Program(["true"]).run(BrokenContainer(), 5.0)  # type: ignore[arg-type]
