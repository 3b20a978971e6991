"""The run's tools as a check has them: made like a worker's, closed with everything they hold."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from penstock.agent_loops import load_object
from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.boxes import open_sandbox
from penstock.tools import BaseTool, close_tools, make_tools


@contextlib.contextmanager
def opened_tools(config: RunConfig) -> Iterator[Mapping[str, BaseTool]]:
    """Users' tools are found from the current directory, as a worker finds them.

    Raises `SandboxError`, `ToolConfigError`, `LoadError`.
    """
    sandbox = open_sandbox(config) if config.tools else None
    tools: Mapping[str, BaseTool] = {}
    try:
        tools = make_tools(config.tools, sandbox, partial(load_object, recipe_dir=Path.cwd()))
        yield tools
    finally:
        asyncio.run(close_tools(tools.values()))
        if sandbox is not None:
            asyncio.run(sandbox.close())
