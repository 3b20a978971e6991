"""CodeAct: the model acts by writing code blocks; without a schema. What a block prints is the next observation."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pydantic import BaseModel, ConfigDict, Field

from penstock.agent_loops.base import AgentLoopBase
from penstock.agent_loops.conversation import Conversation
from penstock.agent_loops.errors import InfraFailure
from penstock.agent_loops.loops.react import TurnRewards, final_answer, read_settings, with_system
from penstock.agent_loops.segment import TRUNCATED_TURNS, AgentLoopOutput
from penstock.tools import ToolResult
from penstock.tools.parsers import ToolCall
from penstock.transfer_queue import Task

FENCE = "```"
INSTRUCTION = (
    "You act by writing Python. Put code into a block that begins with ```python and ends with ```; it is run, and you "
    "are shown what it printed. Names live on from block to block. When you know the answer, give it without a block."
)


class CodeActSettings(BaseModel):
    """`agent.settings` of `code_act`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tool: str = Field("python", description="The tool that runs a block.")
    argument: str = Field("code", description="Its argument that takes the block's text.")
    languages: tuple[str, ...] = Field(("python", "py"), description="Blocks of other languages are text.")
    instruction: str = Field(INSTRUCTION, description="Goes before the row's system prompt; empty: nothing does.")


class CodeActLoop(AgentLoopBase):
    """All blocks of an answer are run, in order, by one tool with one state; an answer without a block is the last.

    So is one whose block gives a result that is `final`.
    """

    settings_kind = CodeActSettings

    async def setup(self, task: Task) -> None:
        self.settings = read_settings(CodeActSettings, self)
        names = [schema["function"]["name"] for schema in self.tools.schemas]
        if self.settings.tool not in names:
            raise InfraFailure(
                "loop", f"code_act runs blocks with the tool {self.settings.tool!r}; the recipe has {names}"
            )

    async def run(self, task: Task) -> list[AgentLoopOutput]:
        talk = Conversation(self.chat, with_system(task.messages, self.settings.instruction))
        rewards, outcome = TurnRewards(), None
        while not talk.done:
            reply = await self.llm.generate(talk.segment)
            blocks = code_blocks(self.chat.decode(reply.token_ids, special=False), self.settings.languages)
            if not blocks or reply.finish_reason == "length":
                break
            if talk.done:
                outcome = TRUNCATED_TURNS
                break
            tool, argument = self.settings.tool, self.settings.argument
            calls = [ToolCall(tool, {argument: code}, f"call_{position}") for position, code in enumerate(blocks)]
            results = await self.tools.call_all(calls)
            rewards.add(results)
            if final_answer(results) is not None:
                break
            talk.go_on(reply, [{"role": "user", "content": _observed(results)}])
        return talk.outputs(outcome, rewards.of(talk.num_turns))


def code_blocks(text: str, languages: Collection[str]) -> list[str]:
    """Texts of the closed fenced blocks in these languages, in order; one pass, whatever `text` is."""
    blocks: list[str] = []
    lines: list[str] | None = None
    is_code = False
    for line in text.split("\n"):
        mark = line.strip()
        if lines is None and mark.startswith(FENCE):
            lines, is_code = [], mark.removeprefix(FENCE).strip().lower() in languages
        elif lines is not None and mark == FENCE:
            blocks += ["\n".join(lines)] if is_code and any(map(str.strip, lines)) else []
            lines = None
        elif lines is not None:
            lines.append(line)
    return blocks


def _observed(results: Sequence[ToolResult]) -> str:
    if len(results) == 1:
        return f"Output:\n{results[0].text}"
    return "\n".join(f"Output of block {at}:\n{result.text}" for at, result in enumerate(results, start=1))
