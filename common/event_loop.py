"""The event loop of a process in which code of users runs: `sys.exit` in one of its tasks ends that task alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)


def run_users_code(runner: asyncio.Runner, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. A `SystemExit` that `work` itself does not raise is logged and the loop continues.

    asyncio stops its loop at a `SystemExit` of any task, which would end all episodes of the process. The task has the
    exception by then, so that the episode that awaits the task fails by it.
    """
    task = runner.get_loop().create_task(work)
    while True:
        try:
            runner.run(_ended(task))
            return task.result()
        except SystemExit as error:
            if task.done():
                raise
            logger.warning("a task called sys.exit; the process continues", exc_info=error)


async def _ended(task: asyncio.Task[Any]) -> None:
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:  # Ctrl-C
        task.cancel()
        await asyncio.wait([task])
        raise
