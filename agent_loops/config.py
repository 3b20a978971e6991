"""Settings of agent workers, loops and rewards."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from penstock.common import is_loopback, pattern_of
from penstock.tools.parsers import ParserName

V = TypeVar("V")
BY_SOURCE = "by_data_source"
"""The reward that chooses one by the row's data source."""
MOST_TOP_K = 1024
"""Beyond it a token costs 8 KiB, and the rest of a distribution is little."""


def entry_of(table: Mapping[str, V], data_source: str) -> V | None:
    """Returns the entry of a data source, or of the pattern (`my_*`) that it matches."""
    pattern = pattern_of(data_source, table)
    return None if pattern is None else table[pattern]


class RewardChoice(BaseModel):
    """A reward and its settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(description="A registered name (page 'My own reward'), a dotted path or FILE.py:function.")
    settings: dict[str, Any] = Field(default_factory=dict, description="Given to the reward (page 'My own reward').")


class RewardsConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    settings: dict[str, Any] = Field(default_factory=dict, description="Given to the reward that `agent.reward` names.")
    sources: dict[str, str | RewardChoice] = Field(
        default_factory=dict,
        description="Under `agent.reward: by_data_source`: data source or pattern (`my_*`) → reward; before verl's.",
    )
    timeout_s: float = Field(60.0, gt=0, description="An answer not scored by then is an infra_error, never a 0.")


class TeacherConfig(BaseModel):
    """A server that judges the tokens of finished episodes (docs/guide/distillation.md)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(
        description="Of vLLM, SGLang, `penstock teacher-server` or another OpenAI-compatible server with logprobs of"
        " prompts, such as http://127.0.0.1:8950."
    )
    model: str = Field("", description="Its name there; empty: the first that the server lists.")
    key_variable: str = Field(
        "PENSTOCK_TEACHER_TOKEN", description="Environment variable of its bearer token; unset: none is sent."
    )
    timeout_s: float = Field(120.0, gt=0, description="Of one request, which judges one segment.")
    retries: int = Field(30, ge=0, description="Further requests if it was busy or not reached, with pauses.")
    deadline_s: float = Field(
        240.0,
        gt=0,
        description="Of a segment's requests and the pauses between them; then infra_error. Below stall_timeout_s, so"
        " that a teacher that is away is named.",
    )
    concurrency: int = Field(8, gt=0, description="Requests at once from one agent worker.")
    top_k: int = Field(
        0,
        ge=0,
        le=MOST_TOP_K,
        description="Likeliest ids that it gives per sampled token, for trainer.distill.divergence; 8 bytes each. vLLM"
        " gives at most its `--max-logprobs`, by default 20. 0: the logprob of the sampled token alone.",
    )


class ForksConfig(BaseModel):
    """Episodes that leave another one at one of its turns (docs/extend/loop.md)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    branches: int = Field(
        gt=0, description="Branches of each root. A group of 8 with 3 has 2 roots, which begin with the task."
    )
    turn: Literal["entropy", "random", "loop"] = Field(
        "entropy",
        description="Turn at which an ended root is forked: the one of the highest mean entropy, or any of them. loop:"
        " where the agent loop calls `fork` itself.",
    )


class CaptureConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    idle_s: float = Field(
        300.0, gt=0, description="A gateway session without a call for this long is returned to the queue."
    )
    model_aliases: list[str] = Field(
        default_factory=list,
        description="Names of the model for agents that insist on one, such as gpt-4o, besides its own.",
    )


class SourceConfig(BaseModel):
    """Settings of one data source's tasks; unset ones are those of all tasks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    loop: str | None = Field(None, description="As `agent.loop`; a row's own `agent_name` goes before.")
    settings: dict[str, Any] | None = Field(None, description="As `agent.settings`, in place of them.")
    tools: tuple[str, ...] | None = Field(
        None, description="Which of the recipe's tools its episodes have, by the names that the model calls; []: none."
    )
    max_turns: int | None = Field(None, gt=0, description="As `agent.max_turns`.")
    max_new_tokens: int | None = Field(None, gt=0, description="As `agent.max_new_tokens`.")
    max_response_tokens: int | None = Field(None, gt=0, description="As `agent.max_response_tokens`.")
    episode_deadline_s: float | None = Field(None, gt=0, description="As `agent.episode_deadline_s`.")


class AgentConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    loop: str = Field("tool_agent", description="Registered name or dotted path of the AgentLoopBase to run.")
    settings: dict[str, Any] = Field(default_factory=dict, description="The loop's own settings, as self.config.")
    workers: int = Field(2, ge=0, description="Agent workers that `penstock run` starts.")
    max_restarts: int = Field(
        20,
        ge=0,
        description="Restarts of one worker within an hour before the run stops. They are"
        " forgiven once the episode that caused them is a dead letter.",
    )
    concurrency: int = Field(32, gt=0, description="Most episodes one worker runs at once; fewer under load.")
    server_requests: int | None = Field(
        None,
        ge=0,
        description="Requests in flight per rollout server above which workers run fewer episodes;"
        " 0: unlimited. Unset: twice `rollout.max_concurrent`.",
    )
    max_turns: int = Field(4, gt=0, description="Model calls per episode.")
    max_new_tokens: int = Field(256, gt=0, description="Tokens sampled per model call.")
    max_response_tokens: int = Field(512, gt=0, description="Response tokens per episode, observations included.")
    temperature: float = Field(1.0, ge=0.0, description="Sampling temperature in training.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Below 1 the policy gradient is biased; see docs.")
    top_k: int = Field(-1, ge=-1, description="Above 0 the policy gradient is biased; see docs.")
    episode_deadline_s: float = Field(120.0, gt=0, description="An episode that takes longer is truncated(deadline).")
    parser: Literal["auto", ParserName] = Field(
        "auto",
        description="Format of the model's tool calls (page 'Tools and parsers'). auto: of the only parser that"
        " reads those of its chat template; if there is none, tools are refused.",
    )
    thinking_history: Literal["keep", "strip"] = Field(
        "keep", description="Old thinking: kept token for token, or a new segment where the chat template drops it."
    )
    template_settings: dict[str, Any] = Field(
        default_factory=dict, description="Variables for the chat template, such as enable_thinking: false."
    )
    date: datetime.date | None = Field(
        None, description="What chat templates take for today. Unset: the day on which the run started first."
    )
    capture: CaptureConfig = CaptureConfig()
    forks: ForksConfig | None = Field(
        None, description="Members of a group share the beginnings of others (page 'Agent loops'). None: none does."
    )
    reward: str = Field(
        "",
        description="A name of the page 'My own reward', by_data_source, or a compute_score as dotted path or"
        " FILE.py:function. Empty: the loop's or environment's own reward, else the sum of the tools' calc_reward.",
    )
    rewards: RewardsConfig = RewardsConfig()
    sources: dict[str, SourceConfig] = Field(
        default_factory=dict,
        description="Data source or pattern (`my_*`) → loop, tools and limits of its tasks, if not the run's.",
    )
    teachers: dict[str, TeacherConfig] = Field(
        default_factory=dict,
        description="Data source or pattern (`my_*`, `*`) → its teacher; trainer.distill says how it is learned from.",
    )

    @field_validator("teachers")
    @classmethod
    def _one_token_one_host(cls, teachers: dict[str, TeacherConfig]) -> dict[str, TeacherConfig]:
        """A token goes to the host that it is for, to no other one."""
        hosts: dict[str, str] = {}
        for source, teacher in teachers.items():
            host = urlsplit(teacher.url).hostname or ""
            host = "this machine" if is_loopback(host) else host
            if hosts.setdefault(teacher.key_variable, host) != host:
                raise ValueError(
                    f"{source}: key_variable {teacher.key_variable} holds the token of the teacher at"
                    f" {hosts[teacher.key_variable]}, {host} would get it too; name a separate variable"
                )
        return teachers

    @model_validator(mode="after")
    def _check_rewards(self) -> AgentConfig:
        if self.rewards.sources and self.reward != BY_SOURCE:
            raise ValueError(f"rewards.sources are used by reward: {BY_SOURCE}; it is {self.reward!r}")
        if self.rewards.settings and self.reward in ("", BY_SOURCE):
            raise ValueError(
                f"rewards.settings are those of one reward; reward is {self.reward!r}: give them in rewards.sources,"
                " as DATA_SOURCE: {name: REWARD, settings: …}"
            )
        return self

    def of_source(self, data_source: str) -> AgentConfig:
        """Returns the settings for tasks of `data_source`."""
        own = entry_of(self.sources, data_source)
        if own is None:
            return self
        values = {name: getattr(own, name) for name in SourceConfig.model_fields if name != "tools"}
        return self.model_copy(update={name: value for name, value in values.items() if value is not None})

    def of_sources(self) -> list[AgentConfig]:
        """Returns the settings for all tasks, then those of each of `sources`."""
        return [self, *(self.of_source(source) for source in self.sources)]

    @property
    def loops(self) -> list[str]:
        """Names of the recipe's loops, each once; rows may name others."""
        return list(dict.fromkeys(one.loop for one in self.of_sources()))

    @property
    def most_response_tokens(self) -> int:
        """`max_response_tokens` of the data source that has most."""
        return max(one.max_response_tokens for one in self.of_sources())

    @property
    def teacher_top_k(self) -> tuple[int, ...]:
        """`top_k` of each teacher, see `RunContext.teacher_top_k`."""
        return tuple(teacher.top_k for teacher in self.teachers.values())
