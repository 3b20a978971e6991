"""Context compaction: where the window fills, the model summarises its history, and its summary replaces that.

segment 1   task ─► turns … ─► "summarise" ─► summary │
segment 2   task + summary ─► turns … ─► "summarise" ─► summary │
segment 3   task + summary ─► turns … ─► answer

A summary is sampled in the segment that it ends, so it is trained like every other turn. All segments are of one
episode and share its return: a summary that keeps what the answer needs is reinforced, one that loses it is not.

Wu et al. 2025, "ReSum" (arXiv:2509.13313) and Lu et al. 2025, "SUPO" (arXiv:2510.06727): the return of the episode is
the return of each of its segments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from penstock.agent_loops.base import AgentLoopBase, read_as
from penstock.agent_loops.chat.template import Message
from penstock.agent_loops.config import AgentConfig
from penstock.agent_loops.conversation import Conversation
from penstock.agent_loops.loops.react import ReactSettings, react, read_settings
from penstock.agent_loops.segment import AgentLoopOutput
from penstock.rollout_server import Generation
from penstock.transfer_queue import Task

REQUEST = (
    "The conversation is about to be replaced by a summary of it. Write that summary now, without calling a tool: what"
    " was found, what was tried, and what remains to be done."
)


class CompactionSettings(ReactSettings):
    """`agent.settings` of `compaction`."""

    compact_at: int = Field(
        4096,
        gt=0,
        description="Tokens of context from which on a turn's results are followed by the request for a summary. One"
        " more turn with its results, the request and the summary must fit between it and rollout.max_model_len.",
    )
    max_summary_tokens: int = Field(512, gt=0, description="A summary ends there.")
    request: str = Field(REQUEST, min_length=1, description="The user's message that asks for a summary.")
    heading: str = Field("Summary of the work so far:", description="Stands above the summary in the task's message.")


class CompactionLoop(AgentLoopBase):
    """`tool_agent` whose context stays bounded. `agent.settings` are `CompactionSettings`."""

    settings_kind = CompactionSettings

    @classmethod
    def longest_response(cls, config: AgentConfig) -> int:
        """`agent.max_response_tokens` are shared by all segments. One turn's results and the request come on top."""
        settings = read_as(CompactionSettings, config.settings, cls)
        return settings.compact_at + config.max_new_tokens + settings.max_summary_tokens

    async def setup(self, task: Task) -> None:
        self.settings = read_settings(CompactionSettings, self)

    async def run(self, task: Task) -> list[AgentLoopOutput]:
        talk = Conversation(self.chat, task.messages, self.tools.schemas)

        async def go_on(reply: Generation, messages: Sequence[Message]) -> None:
            # Two turns: the summary, and one to use it.
            compacts = self.chat.budget.turns_left >= 2 and talk.segment.context_len >= self.settings.compact_at
            if not compacts:
                talk.go_on(reply, messages)
                return
            talk.go_on(reply, [*messages, {"role": "user", "content": self.settings.request}])
            if talk.done:
                return  # the budget has no room for a summary
            answer = await self.llm.generate(talk.segment, max_new_tokens=self.settings.max_summary_tokens)
            summary = self.chat.decode(answer.token_ids, special=False).rpartition("</think>")[2].strip()
            talk.restart(with_summary(task.messages, f"{self.settings.heading}\n{summary}"))

        return (await react(self, talk, self.settings, go_on)).outputs


def with_summary(messages: Sequence[Message], text: str) -> list[Mapping[str, Any]]:
    """The task's messages with `text` at the end of the last one."""
    content = messages[-1]["content"]
    longer = f"{content}\n\n{text}" if isinstance(content, str) else [*content, {"type": "text", "text": f"\n\n{text}"}]
    return [*messages[:-1], {**messages[-1], "content": longer}]
