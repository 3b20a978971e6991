"""Settings of rewards."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class RewardChoice(BaseModel):
    """A reward with settings of its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(description="A name of docs/rewards.md, a dotted path or FILE.py:function.")
    settings: dict[str, Any] = Field(default_factory=dict, description="Given to the reward, see docs/rewards.md.")


class RewardsConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    settings: dict[str, Any] = Field(default_factory=dict, description="Given to the reward that `agent.reward` names.")
    sources: dict[str, str | RewardChoice] = Field(
        default_factory=dict,
        description="Under `agent.reward: by_data_source`: data source or pattern (`my_*`) → reward; before verl's.",
    )
    timeout_s: float = Field(60.0, gt=0, description="An answer not scored by then is an infra_error, never a 0.")
