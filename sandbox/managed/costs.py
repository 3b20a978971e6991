"""Counts the cost of the boxes of one process: seconds of life times a price."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from penstock.common import Metrics
from penstock.sandbox.config import ManagedConfig
from penstock.sandbox.managed.api import CostLimit


@dataclass(slots=True)
class CostMeter:
    """A box counts from the moment it is asked for until the provider confirmed its end."""

    config: ManagedConfig
    _ended: int = 0
    _past_s: float = 0.0
    _living: dict[str, float] = field(default_factory=dict)
    """Request → when it was made."""

    def start(self, request: str) -> None:
        """Raises `CostLimit` before anything is asked for."""
        limit = self.config.cost_limit
        if limit is not None and self.cost >= limit:
            raise CostLimit(
                f"sandbox.managed.cost_limit: the boxes of this process have cost {self.cost:.2f} of {limit:g}"
                f" ({self.box_seconds:.0f} s at {self.config.price_per_hour:g} an hour): raise it, or end the run"
            )
        self._living[request] = time.monotonic()

    def end(self, request: str) -> None:
        """A second end of the same box is ignored."""
        began = self._living.pop(request, None)
        if began is not None:
            self._ended += 1
            self._past_s += time.monotonic() - began

    def forget(self, request: str) -> None:
        """No box was made."""
        self._living.pop(request, None)

    @property
    def boxes(self) -> int:
        """Number of boxes that were requested and not refused."""
        return self._ended + len(self._living)

    @property
    def box_seconds(self) -> float:
        now = time.monotonic()
        return self._past_s + sum(now - began for began in self._living.values())

    @property
    def cost(self) -> float:
        """The cost in the unit of `price_per_hour`."""
        return self.box_seconds / 3600.0 * self.config.price_per_hour


class CostGauges:
    """A process's metrics of what its boxes cost: 0 for boxes without a provider."""

    def __init__(self, metrics: Metrics) -> None:
        self._boxes = metrics.gauge("managed_boxes", "Boxes of a provider that this process has asked for and got")
        self._seconds = metrics.gauge("managed_box_seconds", "Seconds that these have lived")
        self._cost = metrics.gauge("managed_cost", "What they cost, at sandbox.managed.price_per_hour")

    def follow(self, costs: CostMeter) -> None:
        """Follow a meter, which is read at each scrape."""
        self._boxes.set_function(lambda: costs.boxes)
        self._seconds.set_function(lambda: costs.box_seconds)
        self._cost.set_function(lambda: costs.cost)
