"""A small agent that repairs repositories: look around once, then one tool after the other until it submits.

penstock run recipes/swe/cpu.yaml
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from penstock.agent_loops import AgentLoopBase, Conversation, register, tool_messages
from penstock.agent_loops.loops import final_answer, read_settings, with_system
from penstock.tools.parsers import ToolCall

SYSTEM = (
    "You repair software. `shell` runs bash commands in the repository, `editor` views and changes files, `submit` "
    "hands your changes in. Reproduce the bug first, change as little as fixes it, and run the tests again before you "
    "submit."
)


class MiniSweSettings(BaseModel):
    """`agent.settings`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    look: str = Field("git ls-files | head -n 60", description="Run before the first answer; empty: nothing is.")
    reminders: int = Field(2, ge=0, description="Answers without a call that are answered; one more ends the episode.")


@register("mini_swe")
class MiniSweAgent(AgentLoopBase):
    settings_kind = MiniSweSettings

    async def run(self, task):
        settings = read_settings(MiniSweSettings, self)
        talk = Conversation(self.chat, await self._messages(task, settings), self.tools.schemas)
        reminders = settings.reminders
        while not talk.done:
            reply = await self.llm.generate(talk.segment)
            calls = self.chat.tool_calls(reply)
            if calls:
                results = await self.tools.call_all(calls)
                if final_answer(results) is not None:
                    break
                talk.go_on(reply, tool_messages(results))
            elif reminders and not talk.done:
                reminders -= 1
                reminder = "Call one of your tools; `submit` when the repository is repaired."
                talk.go_on(reply, [{"role": "user", "content": reminder}])
            else:
                break
        return talk.outputs()

    async def _messages(self, task, settings):
        """The task with what the repository looks like: every episode has its box from the beginning."""
        messages = with_system(task.messages, SYSTEM)
        if settings.look:
            (seen,) = await self.tools.call_all([ToolCall("shell", {"command": settings.look}, "look")])
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}\n\n$ {settings.look}\n{seen.text}"}
        return messages
