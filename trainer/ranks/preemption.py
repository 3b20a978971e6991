"""A step under way is given up when the trainer receives the signal to stop, as long as it has changed no weight.

    begin_step ─► check ─► pack ─► check ─► pack ─► … ─► check ─► weights_change ─► optimizer step ─► …
                    │ any rank received a stop                      the step is finished from here on
                    └─► StepAbandoned, on all ranks at the same place

Its batch is still the queue's for that step: the next life of the trainer leases it again, and trains it once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.trainer.ranks.distributed import Ranks


class StepAbandoned(Exception):
    """The trainer received a stop before the step had changed a weight. Raised on all ranks."""


class Preemption:
    """Use `ranks.own(Preemption)`: loop and engine share one. Without `listen` every method is a no-op."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._is_told: Callable[[], bool] | None = None
        self._may_give_up = False
        self._random = torch.empty(0)

    def listen(self, is_told: Callable[[], bool]) -> None:
        """`is_told`: whether this rank is to stop. Called from the thread that does the torch work."""
        self._is_told = is_told

    def begin_step(self) -> None:
        """Begin a step; called on all ranks, before its first forward."""
        self._may_give_up = self._is_told is not None
        self._random = torch.get_rng_state()

    def check(self) -> None:
        """A collective until `weights_change`. Raises `StepAbandoned` on all ranks if any received a stop; torch's
        generator is then as before the step, since a checkpoint holds its state."""
        if not self._may_give_up or self._is_told is None:
            return
        if self._ranks.any(self._is_told()):
            self._may_give_up = False
            torch.set_rng_state(self._random)
            raise StepAbandoned

    def weights_change(self) -> None:
        """Take note that policy or critic change: the running step is finished, whatever signal comes from here on."""
        self._may_give_up = False

    def close(self) -> None:
        self._is_told = None
