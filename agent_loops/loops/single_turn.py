"""One question, one answer."""

from __future__ import annotations

from penstock.agent_loops.base import AgentLoopBase
from penstock.agent_loops.segment import AgentLoopOutput
from penstock.transfer_queue import Task


class SingleTurnLoop(AgentLoopBase):
    """Asks the model once; no tools."""

    async def run(self, task: Task) -> AgentLoopOutput:
        segment = self.chat.start(task.messages)
        await self.llm.generate(segment)
        return segment.output()
