"""The console of a head: standard error, whose reader may leave before the run ends.

penstock run … 2>&1 | tee log      Ctrl-C ends tee at once, and the run in order
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys

from rich.console import Console


class HeadConsole(Console):
    """Prints to standard error; without a reader what is printed is dropped, and the run continues."""

    def __init__(self) -> None:
        super().__init__(stderr=True, highlight=False)

    def complain(self, message: str, status: int, *, as_json: bool = False) -> int:
        """Print why a command ends, with `as_json` as ``{"error": …}`` too; returns the exit status."""
        self.print(message, style="red", markup=False, soft_wrap=True)
        if as_json:
            print(json.dumps({"error": message}))
        return status

    def on_broken_pipe(self) -> None:
        """Drop what is printed from now on. Rich's own raises `SystemExit`."""
        _drop(sys.stderr.fileno())


def drop_without_terminal() -> None:
    """Drop what is printed from now on if standard error is a terminal that was closed: each write would fail."""
    with contextlib.suppress(OSError):  # it is no file of the system
        number = sys.stderr.fileno()
        if stat.S_ISCHR(os.fstat(number).st_mode) and not os.isatty(number):
            _drop(number)


def _drop(number: int) -> None:
    """Lead a descriptor to nowhere, for all that writes to it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
