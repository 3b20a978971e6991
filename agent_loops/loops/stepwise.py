"""Step-independent turns (verl-agent's way): each turn is its own prompt, made from the task and a memory.

turn t:  task + memory(history up to t-1) ──► one segment: prompt, one answer ──► tools ──► history

The context stays as long as the memory is, however long the episode; the price is that prompts share no prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from penstock.agent_loops.base import AgentLoopBase
from penstock.agent_loops.errors import InfraFailure
from penstock.agent_loops.loops.react import final_answer, read_settings
from penstock.agent_loops.segment import AgentLoopOutput
from penstock.tools import ToolResult
from penstock.tools.parsers import ToolCall
from penstock.transfer_queue import Task

MAX_CHARS_PER_TURN = 400
"""Characters of an answer, and of each result, that the memory shows."""


class StepwiseSettings(BaseModel):
    """`agent.settings` of `stepwise`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    remembered_turns: int = Field(5, ge=0, description="Newest turns that the memory in the box contains.")


@dataclass(frozen=True, slots=True)
class Step:
    """One turn that is over."""

    text: str
    """The model's answer without special tokens."""
    calls: Sequence[ToolCall]
    results: Sequence[ToolResult]
    """Results in the order of `calls`."""


class StepwiseLoop(AgentLoopBase):
    """Write `memory` (or all of `prompt`) for your task.

    The episode ends with an answer that calls no tool, or with a tool result that is `final`.
    """

    settings_kind = StepwiseSettings

    async def setup(self, task: Task) -> None:
        self.settings = read_settings(StepwiseSettings, self)

    def memory(self, history: Sequence[Step]) -> str:
        """The memory of earlier turns that the next prompt holds; must be a function of `history` alone."""
        newest = history[len(history) - min(len(history), self.settings.remembered_turns) :]
        first = len(history) - len(newest) + 1
        lines = []
        for number, step in enumerate(newest, start=first):
            lines.append(f"{number}. you: {step.text[:MAX_CHARS_PER_TURN]}")
            lines += [f"   result: {result.text[:MAX_CHARS_PER_TURN]}" for result in step.results]
        return "\n".join(lines)

    def prompt(self, task: Task, history: Sequence[Step]) -> list[Mapping[str, Any]]:
        """The messages of the next turn: the task's, with the memory at the end of the last one."""
        messages, memory = list(task.messages), self.memory(history)
        if not memory:
            return messages
        return [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}\n\nSo far:\n{memory}"}]

    async def run(self, task: Task) -> list[AgentLoopOutput]:
        """One output per turn; tools of the last turn that fits are run, for what they reward."""
        outputs: list[AgentLoopOutput] = []
        history: list[Step] = []
        while (output := await self._step(task, history)) is not None:
            outputs.append(output)
            if len(history) < len(outputs):
                return outputs
        if not outputs:
            raise InfraFailure("loop", "the budget leaves no room for a single turn")
        return [*outputs[:-1], replace(outputs[-1], outcome=self.chat.budget.truncation)]

    async def _step(self, task: Task, history: list[Step]) -> AgentLoopOutput | None:
        """One turn; a turn that called tools joins the history, unless a result of them is final.

        None if the context has no room for one.
        """
        segment = self.chat.start(self.prompt(task, history), tools=self.tools.schemas)
        if segment.done:
            return None
        reply = await self.llm.generate(segment)
        calls = self.chat.tool_calls(reply)
        results = await self.tools.call_all(calls) if calls else []
        if calls and final_answer(results) is None:
            history.append(Step(self.chat.decode(reply.token_ids, special=False).strip(), calls, results))
        return segment.output(turn_rewards=[sum(result.reward or 0.0 for result in results)])
