"""Settings of one tool in a recipe."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.tools.truncation import Part
from penstock.tools.verl import from_verl


class ToolConfig(BaseModel):
    """An entry in verl's shape (`class_name`, `config`, `tool_schema`) is read as one of these."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(
        description="Registered name (`python`), or dotted path or `FILE.py:name` of a BaseTool or @function_tool."
    )
    settings: dict[str, Any] = Field(default_factory=dict, description="Given to the tool's constructor.")
    timeout_s: float = Field(10.0, gt=0, description="Deadline of one call; past it the model reads a timeout error.")
    max_output_chars: int = Field(2000, gt=0, description="Longer results are cut, and say so.")
    max_output_tokens: int | None = Field(
        None, gt=0, description="The same in the model's tokens; where both are given the narrower one holds."
    )
    cut: Part = Field("middle", description="What is left out of a long result: its `head`, `tail` or `middle`.")
    concurrency: int | None = Field(
        None, gt=0, description="Calls at once from one worker, for rate-limited services; others wait for a turn."
    )
    retries: int = Field(3, ge=0, le=20, description="Further attempts where a service was busy or not reached.")
    cache_entries: int = Field(4096, ge=0, description="Results that a worker remembers, where the tool is pure.")
    tool_schema: dict[str, Any] | None = Field(
        None, description="Name, description and parameters in OpenAI's shape, instead of the tool's own."
    )

    @model_validator(mode="before")
    @classmethod
    def _read_verl(cls, value: Any) -> Any:
        return from_verl(value) if isinstance(value, dict) and "class_name" in value else value
