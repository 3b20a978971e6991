"""A planner that hands questions to helpers: each helper is its own segment, and they work side by side.

planner ──delegate(question) × n──► helper 1 … n (own prompt, own tools' calls) ──answers──► planner ──► answer

All segments share the episode's reward and its budget; each batch of helpers divides half of what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.agent_loops.base import AgentLoopBase
from penstock.agent_loops.chat.chat import tool_messages
from penstock.agent_loops.conversation import Conversation
from penstock.agent_loops.loops.react import ReactSettings, react, read_settings, with_system
from penstock.agent_loops.segment import TRUNCATED_TURNS, AgentLoopOutput, Budget, last_answer
from penstock.tools import ToolResult, check_arguments
from penstock.tools.parsers import ToolCall
from penstock.transfer_queue import Task

PARAMETERS = {
    "type": "object",
    "properties": {"question": {"type": "string"}},
    "required": ["question"],
    "additionalProperties": False,
}
DELEGATE = {
    "type": "function",
    "function": {
        "name": "delegate",
        "description": "Ask a helper. It sees nothing but your question; several calls in one turn run side by side.",
        "parameters": PARAMETERS,
    },
}


@dataclass(frozen=True, slots=True)
class HelperResult:
    """The result of one call; no `outputs` if no helper was asked."""

    result: ToolResult
    outputs: Sequence[AgentLoopOutput] = ()


class MultiAgentLoop(AgentLoopBase):
    """An example to change: the planner's segment is the last output, so its end is the episode's.

    `agent.settings` are `ReactSettings`, which hold for each helper.
    """

    settings_kind = ReactSettings

    async def setup(self, task: Task) -> None:
        self.settings = read_settings(ReactSettings, self)
        self.helped: list[AgentLoopOutput] = []

    async def run(self, task: Task) -> list[AgentLoopOutput]:
        prompt = "Divide the task into questions, delegate them, and answer from what the helpers say."
        talk = Conversation(self.chat, with_system(task.messages, prompt), [DELEGATE])
        outcome = None
        while not talk.done:
            reply = await self.llm.generate(talk.segment)
            calls = self.chat.tool_calls(reply)
            if not calls:
                break
            if talk.done:
                outcome = TRUNCATED_TURNS
                break
            talk.go_on(reply, tool_messages(await self._delegate(calls)))
        return [*self.helped, *talk.outputs(outcome)]

    async def _delegate(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """One result per call, in order; a call that cannot be handed on gets an error text."""
        problems = [_problem_with(call) for call in calls]
        shares = self._shares(problems.count(None))
        free = iter(shares)
        work = [
            self._help(call, problem, None if problem else next(free, None))
            for call, problem in zip(calls, problems, strict=True)
        ]
        answers = await self.together(work)
        self.chat.budget.turns += sum(share.turns for share in shares)
        self.chat.budget.response_tokens += sum(share.response_tokens for share in shares)
        self.tools.counts.final_answer = None  # what a helper ended with answers the planner, not the task
        self.helped += [output for answer in answers for output in answer.outputs]
        return [answer.result for answer in answers]

    async def _help(self, call: ToolCall, problem: str | None, share: Budget | None) -> HelperResult:
        """One helper from its question to its last words, or to the tool result that it ended with."""
        if share is None:
            problem = problem or "no helper is free any more; answer yourself"
            return HelperResult(ToolResult(f"Error: {problem}", is_error=True))
        question = [{"role": "user", "content": str(call.arguments["question"])}]
        chat = self.chat.for_episode(share)
        talk = Conversation(chat, with_system(question, "Answer the question, in few words."), self.tools.schemas)
        ended = await react(self, talk, self.settings)
        text = self.chat.decode(last_answer(ended.outputs[-1]), special=False).strip()
        return HelperResult(ToolResult(text if ended.answer is None else ended.answer), ended.outputs)

    def _shares(self, helpers: int) -> list[Budget]:
        """Budgets of the helpers of one turn: equal, so that none depends on how fast another is.

        The planner keeps one turn and half of the tokens.
        """
        budget = self.chat.budget
        # At most 8 helpers in one turn of the planner.
        count = min(helpers, 8, max(0, budget.turns_left - 1), budget.tokens_left // 2)
        turns = min(4, (budget.turns_left - 1) // max(count, 1))  # a helper has 4 model calls
        return [Budget(turns, budget.tokens_left // 2 // count, budget.window) for _ in range(count)]


def _problem_with(call: ToolCall) -> str | None:
    if call.error:
        return call.error
    if call.name != "delegate":
        return f"there is no tool {call.name!r} (tools: delegate)"
    return check_arguments(PARAMETERS, call.arguments)
