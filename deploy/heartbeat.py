"""A file that is touched while a role's event loop turns: what a container's health check looks at."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

VARIABLE = "PENSTOCK_HEARTBEAT"
EVERY_S = 5.0


async def beat() -> None:
    """Until cancelled, where the environment names a file; else returns at once."""
    path = os.environ.get(VARIABLE)
    while path:
        Path(path).touch()  # noqa: ASYNC240 - a file in memory, and one call
        await asyncio.sleep(EVERY_S)
