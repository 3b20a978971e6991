"""Section `costs` of a recipe: prices, and the budget of a run."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class CostConfig(BaseModel):
    """Prices in any one currency. The accounts are kept without them, too."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device_hour: float = Field(
        0.0, ge=0, description="Price of an hour of one GPU; on a machine without GPUs, of an hour of CPU time."
    )
    box_hour: float = Field(0.0, ge=0, description="Price of an hour of one sandbox box.")
    judged_call: float = Field(0.0, ge=0, description="Price of one call of a judge or a reward server.")
    budget: float | None = Field(
        None,
        gt=0,
        description="The run saves and ends when its accounts have cost so much; a larger budget resumes it.",
    )

    @model_validator(mode="after")
    def _has_prices(self) -> Self:
        if self.budget is not None and not (self.device_hour or self.box_hour or self.judged_call):
            raise ValueError("budget needs a price: set device_hour, box_hour or judged_call")
        return self

    def of(self, resource: str) -> float:
        """Return the price of one unit of a resource of the accounts; 0 for one that has none."""
        prices = {
            "rollout_s": self.device_hour / 3600,
            "trainer_s": self.device_hour / 3600,
            "box_s": self.box_hour / 3600,
            "judged_calls": self.judged_call,
        }
        return prices.get(resource, 0.0)
