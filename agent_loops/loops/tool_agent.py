"""The ReAct loop: answer, call tools, read what they say, until the model calls none."""

from __future__ import annotations

from penstock.agent_loops.base import AgentLoopBase, AgentLoopOutput
from penstock.agent_loops.conversation import Conversation
from penstock.agent_loops.loops.react import ReactSettings, react, read_settings
from penstock.agent_loops.registry import register
from penstock.transfer_queue import Task


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """Calls of one turn run in parallel; `agent.settings` are `ReactSettings`."""

    async def run(self, task: Task) -> list[AgentLoopOutput]:
        talk = Conversation(self.chat, task.messages, self.tools.schemas)
        return (await react(self, talk, read_settings(ReactSettings, self))).outputs
