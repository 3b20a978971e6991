"""ReAct: answer, call tools, read their results, until the model calls none. `react` is the core of several loops.

Budgets: turns and tokens are the episode's, seconds are `ReactSettings.max_seconds`. The outcome says what ended it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from penstock.agent_loops.base import AgentLoopBase, Settings, read_as
from penstock.agent_loops.chat.chat import tool_messages
from penstock.agent_loops.chat.template import Message
from penstock.agent_loops.conversation import Conversation
from penstock.agent_loops.errors import InfraFailure, LoadError
from penstock.agent_loops.segment import TRUNCATED_DEADLINE, TRUNCATED_TURNS, AgentLoopOutput
from penstock.rollout_server import Generation
from penstock.tools import ToolResult
from penstock.transfer_queue import Outcome, Task


class ReactSettings(BaseModel):
    """`agent.settings` of `tool_agent`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_seconds: float | None = Field(None, gt=0, description="After so long the segment ends as truncated(deadline).")
    max_calls_per_turn: int = Field(32, gt=0, description="Further calls of one answer are answered with an error.")


@dataclass(slots=True)
class TurnRewards:
    """One number per turn of a conversation, from `ToolResult.reward`; empty where no tool ever gave one."""

    values: list[float] = field(default_factory=list)
    has_reward: bool = False

    def add(self, results: Sequence[ToolResult]) -> None:
        self.has_reward = self.has_reward or any(result.reward is not None for result in results)
        self.values.append(sum(result.reward or 0.0 for result in results))

    def fill(self, turns: int) -> None:
        """Turns without tools earned 0."""
        self.values += [0.0] * (turns - len(self.values))

    def of(self, turns: int) -> list[float]:
        """One value per turn."""
        self.fill(turns)
        return self.values if self.has_reward else []


@dataclass(frozen=True, slots=True)
class ReactResult:
    """The end of the loop."""

    outputs: list[AgentLoopOutput]
    answer: str | None = None
    """Text of the tool result that was `final`; None if the model ended by itself, or was ended."""


GoOn = Callable[[Generation, Sequence[Message]], Awaitable[None]]
"""Adds the messages after a reply to the conversation; may ask the model for more."""


async def react(
    loop: AgentLoopBase, talk: Conversation, settings: ReactSettings, go_on: GoOn | None = None
) -> ReactResult:
    """Talks to the end. Calls of one turn run in parallel. `go_on` None: `talk.go_on`.

    Tools are not run for an answer whose results the model could not read any more. Raises `InfraFailure`.
    """
    rewards = TurnRewards()
    try:
        async with asyncio.timeout(settings.max_seconds) as deadline:
            outcome, answer = await _turns(loop, talk, settings, rewards, go_on)
    except TimeoutError:
        if not deadline.expired():
            raise
        if not talk.num_turns:
            raise InfraFailure("rollout", f"nothing was sampled within {settings.max_seconds:g} s") from None
        outcome, answer = TRUNCATED_DEADLINE, None
    return ReactResult(talk.outputs(outcome, rewards.of(talk.num_turns)), answer)


async def _turns(
    loop: AgentLoopBase, talk: Conversation, settings: ReactSettings, rewards: TurnRewards, go_on: GoOn | None
) -> tuple[Outcome | None, str | None]:
    """Returns the outcome (None: set by how the last segment ended) and the final answer of a tool."""
    most = settings.max_calls_per_turn
    refusal = f"at most {most} calls in one turn are run; this one was not"
    while not talk.done:
        reply = await loop.llm.generate(talk.segment)
        calls = loop.chat.tool_calls(reply)
        if not calls:
            break
        if talk.done:
            return TRUNCATED_TURNS, None
        results = await loop.tools.call_all([*calls[:most], *(replace(call, error=refusal) for call in calls[most:])])
        rewards.add(results)
        if (answer := final_answer(results)) is not None:
            return None, answer
        if go_on is None:
            talk.go_on(reply, tool_messages(results))
        else:
            await go_on(reply, tool_messages(results))
            rewards.fill(talk.num_turns)
    return None, None


def final_answer(results: Sequence[ToolResult]) -> str | None:
    """Text of the last result that ends the episode; None where none does."""
    return next((result.text for result in reversed(results) if result.final), None)


def read_settings(kind: type[Settings], loop: AgentLoopBase) -> Settings:
    """`agent.settings` as the loop's own. Raises `InfraFailure` naming the wrong one."""
    try:
        return read_as(kind, loop.config, type(loop))
    except LoadError as error:
        raise InfraFailure("loop", str(error)) from error


def with_system(messages: Sequence[Any], text: str) -> list[Any]:
    """The conversation with `text` before its own system prompt, or as its system prompt."""
    if not text:
        return list(messages)
    if messages and messages[0]["role"] == "system":
        own = messages[0]["content"]
        content = f"{text}\n\n{own}" if isinstance(own, str) else [{"type": "text", "text": f"{text}\n\n"}, *own]
        return [{**messages[0], "content": content}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


class ToolAgentLoop(AgentLoopBase):
    """Calls of one turn run in parallel; `agent.settings` are `ReactSettings`."""

    settings_kind = ReactSettings

    async def run(self, task: Task) -> list[AgentLoopOutput]:
        talk = Conversation(self.chat, task.messages, self.tools.schemas)
        return (await react(self, talk, read_settings(ReactSettings, self))).outputs
