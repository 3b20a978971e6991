"""The processes below a test's run. Boxes end at any moment, also between two questions about one of them."""

from __future__ import annotations

from contextlib import suppress

import psutil


def alive(pid: int, began: float | None = None) -> bool:
    """A zombie that waits for its parent counts as ended, and so does one that did not begin then (`create_time`)."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and began in (None, process.create_time())
    except psutil.NoSuchProcess:
        return False


def living_below(pid: int, *words: str) -> list[psutil.Process]:
    """Living descendants of process `pid` whose command line holds all the words; none where `pid` has ended."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if alive(process.pid) and all(word in line for word in words):
                    found.append(process)
    return found
