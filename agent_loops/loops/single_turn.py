"""One question, one answer."""

from __future__ import annotations

from penstock.agent_loops.base import AgentLoopBase, AgentLoopOutput
from penstock.agent_loops.registry import register
from penstock.transfer_queue import Task


@register("single_turn")
class SingleTurnLoop(AgentLoopBase):
    """Asks the model once; no tools."""

    async def run(self, task: Task) -> AgentLoopOutput:
        segment = self.chat.start(task.messages)
        await self.llm.generate(segment)
        return segment.output()
