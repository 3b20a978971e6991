"""The console of a head: standard error, whose reader may leave before the run ends.

penstock run … 2>&1 | tee log      Ctrl-C ends tee at once, and the run in order
"""

from __future__ import annotations

import os
import sys

from rich.console import Console


class HeadConsole(Console):
    """Prints to standard error; without a reader what is printed is dropped, and the run continues."""

    def __init__(self) -> None:
        super().__init__(stderr=True, highlight=False)

    def on_broken_pipe(self) -> None:
        """Drop what is printed from now on, by logging too. Rich's own raises `SystemExit`."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)
