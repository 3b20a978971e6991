"""Settings of one tool in a recipe."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class ToolConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(description="Registered name (`python`) or dotted path of a BaseTool or @function_tool.")
    settings: dict[str, Any] = Field(default_factory=dict, description="Given to the tool's constructor.")
    timeout_s: float = Field(10.0, gt=0, description="Deadline of one call; past it the model reads a timeout error.")
    max_output_chars: int = Field(2000, gt=0, description="Longer results are cut in the middle, and say so.")
