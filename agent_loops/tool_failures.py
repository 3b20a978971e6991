"""Whatever escapes a tool is the tool's failure, never the model's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from penstock.agent_loops.errors import InfraFailure
from penstock.sandbox import SandboxError, SandboxLost
from penstock.tools import ToolInfraError

T = TypeVar("T")


async def as_infra(name: str, work: Awaitable[T]) -> T:
    """`work` of the tool `name`. Raises `InfraFailure`; `SandboxLost` and `TimeoutError` as they are."""
    try:
        return await work
    except (SandboxLost, TimeoutError):
        raise
    except ToolInfraError as error:
        raise InfraFailure(error.component, error.reason) from error
    except SandboxError as error:
        raise InfraFailure("sandbox", str(error)) from error
    except Exception as error:
        raise InfraFailure(f"tool {name}", f"{type(error).__name__}: {error}") from error


async def within(name: str, deadline_s: float, work: Awaitable[T]) -> T:
    """The same, within a deadline. Raises `InfraFailure`, `SandboxLost`."""
    try:
        async with asyncio.timeout(deadline_s):
            return await as_infra(name, work)
    except TimeoutError as error:
        raise InfraFailure(f"tool {name}", f"not ready within {deadline_s:g} s") from error
