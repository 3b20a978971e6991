"""Where a trainer may be told to die, by SIGKILL from its own hand."""

from __future__ import annotations

import asyncio
import os
import random
import signal

GAPS = (
    "before_step",
    "after_lease",
    "after_step",
    "after_publish",
    "in_spill",
    "in_checkpoint",
    "after_checkpoint",
    "in_commit",
    "after_commit",
)
ANYWHERE = "anywhere"
"""Not a gap: the trainer is killed from outside at a random moment."""


class Gaps:
    """Ends the process the `passes`-th time that it comes by the gap of this `name`; never where that is empty."""

    def __init__(self, name: str, passes: int, chance: random.Random) -> None:
        self._name = name
        self._left = passes
        self._chance = chance

    def at(self, name: str) -> None:
        if self._due(name):
            _die()

    def during(self, name: str) -> None:
        """A moment later: while a request is on its way, being done, or being answered."""
        if self._due(name):
            asyncio.get_running_loop().call_later(self._chance.uniform(0, 0.002), _die)

    def _due(self, name: str) -> bool:
        self._left -= name == self._name
        return name == self._name and self._left == 0


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
