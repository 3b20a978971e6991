"""`agent.settings` of loops on environments."""

from __future__ import annotations

from typing import Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, field_validator

from penstock.agent_loops.errors import InfraFailure
from penstock.transfer_queue import Task


class EnvironmentSettings(BaseModel):
    """Settings of every environment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    options: dict[str, Any] = Field(
        default_factory=dict, description="Given to its factory; those of a row's column `env` come before them."
    )
    system: str = Field("", description="System prompt, before the row's own.")
    actions: list[str] = Field(
        default_factory=list, description="All actions by name, in the order of their numbers. Empty: any text."
    )
    action_pattern: str = Field(
        "", description="The last match in an answer, or its first group, is the action. Empty: the whole answer."
    )
    invalid_reward: float = Field(0.0, description="Of a turn without an action that exists.")
    max_invalid_turns: int | None = Field(
        None, gt=0, description="This many turns in a row without such an action end the episode as policy_error."
    )
    remembered_turns: int | None = Field(
        None,
        ge=0,
        description="Each turn is a separate segment, with this many earlier ones in its prompt. Unset: one chat.",
    )
    show: list[str] = Field(
        default_factory=list, description="Entries of its info that are written below each observation."
    )
    state: str = Field(
        "", description="Name of an entry of its info, an attribute or method: the state's key. Empty: the observation."
    )
    reward: Literal["sum", "last", "none"] = Field(
        "sum", description="The episode's, of its steps' rewards; none: agent.reward is asked."
    )
    max_seconds: float | None = Field(
        None, gt=0, description="Of an episode; then truncated(deadline). Unset: nine tenths of its deadline."
    )
    start_timeout_s: float = Field(
        300.0, gt=0, description="For its import, or the connection to its server, and for a reset."
    )
    step_timeout_s: float = Field(60.0, gt=0, description="A step that takes longer is an infra_error.")


class GymnasiumSettings(EnvironmentSettings):
    """`agent.settings` of `gymnasium`."""

    env: str = Field(
        description="textarena:ID, gymnasium:ID, package:ID-v0, package.module:factory or folder/file.py:factory."
    )
    path: list[str] = Field(
        default_factory=list, description="Folders whose packages the environment's process finds before others."
    )
    observe: Literal["returned", "render"] = Field(
        "returned", description="The model reads what reset and step return, or the text that render() returns."
    )
    rewards: Literal["step", "total"] = Field(
        "step", description="What step returns: this step's reward, or (TextWorld) the score so far."
    )

    @field_validator("env")
    @classmethod
    def _named(cls, env: str) -> str:
        if not env.strip(": "):
            raise ValueError("name an environment, such as textarena:Sokoban-v0")
        return env


class OpenEnvSettings(EnvironmentSettings):
    """`agent.settings` of `openenv`. `options` are those of reset."""

    url: str = Field(description="Of the environment's server, such as http://127.0.0.1:8000.")
    action_field: str = Field(
        "", description="Field of its action that the answer's text goes to. Empty: the only one."
    )
    observation_field: str = Field(
        "", description="Field of its observation that the model reads. Empty: the only one, else all as JSON."
    )


def seed_of(task: Task) -> int:
    """The row's column `seed`, else one made of the task's id: the same for all members of a group. Below 2³¹."""
    seed = task.extra_info.get("seed")
    if seed is None:
        return xxhash.xxh3_64_intdigest(task.task_id.encode()) & 0x7FFFFFFF
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 31:
        raise InfraFailure("task", f"column seed of {task.task_id} must be a number from 0 to 2^31 - 1, found {seed!r}")
    return seed


def options_of(task: Task, settings: EnvironmentSettings) -> dict[str, Any]:
    """Merges options of the settings and of the row's column `env`. Raises `InfraFailure`."""
    own = task.extra_info.get("env") or {}
    if not isinstance(own, dict):
        raise InfraFailure("task", f"column env of {task.task_id} must be a mapping of options, found {own!r}")
    return {
        **settings.options,
        **{name: value for name, value in own.items() if value is not None},
    }  # Parquet fills gaps
