"""The run's tools as a check has them: made like a worker's, closed with everything they hold."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.agent_loops.load import allow_imports_from
from penstock.deploy.checks.boxes import open_sandbox
from penstock.deploy.config import RunConfig
from penstock.tools.base import BaseTool
from penstock.tools.registry import close_tools, make_tools


@contextlib.contextmanager
def opened_tools(config: RunConfig) -> Iterator[Mapping[str, BaseTool]]:
    """Users' tools by dotted path are found from the current directory, as a worker finds them.

    Raises `SandboxError`, `ToolConfigError`.
    """
    allow_imports_from(Path.cwd())
    sandbox = open_sandbox(config) if config.tools else None
    tools: Mapping[str, BaseTool] = {}
    try:
        tools = make_tools(config.tools, sandbox)
        yield tools
    finally:
        asyncio.run(close_tools(tools.values()))
        if sandbox is not None:
            asyncio.run(sandbox.close())
