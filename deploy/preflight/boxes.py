"""The run's boxes as a check opens them, and closes them again: nothing of a check stays."""

from __future__ import annotations

import asyncio
import os

from penstock.deploy.config import RunConfig
from penstock.deploy.link import TOKEN_VARIABLE
from penstock.sandbox import Sandbox

OWNER = "doctor"
ANSWER_DEADLINE_S = 10.0


def open_sandbox(config: RunConfig) -> Sandbox:
    """As a worker has it; a server's token is the run's, from the environment. Raises `SandboxError`."""
    from penstock.sandbox import make_sandbox

    return make_sandbox(config.sandbox, OWNER, os.environ.get(TOKEN_VARIABLE))


def try_sandbox(config: RunConfig) -> None:
    """Raises `SandboxError` where no box can be had, of a server where it does not answer or refuses the token."""
    asyncio.run(_try(config))


async def _try(config: RunConfig) -> None:
    from penstock.sandbox import RemoteSandbox

    sandbox = open_sandbox(config)
    try:
        if isinstance(sandbox, RemoteSandbox):
            await sandbox.client.request("GET", "/health", ANSWER_DEADLINE_S)
    finally:
        await sandbox.close()
