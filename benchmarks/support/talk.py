"""Conversations with a tool, for `bench tokens`: what is said is made before the clock starts."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from penstock.agent_loops import AgentError, Budget, ChatTokens, SegmentBuilder, tool_messages
from penstock.agent_loops.chat import Message
from penstock.rollout_server import Generation
from penstock.tools import BaseTool, ToolResult
from penstock.tools.parsers import ToolCall

THOUGHT_CHARS, RESULT_CHARS = 900, 1_000
CUTS = 40
"""Of a reply's text, where no tokenizer would cut it."""
WORDS = ["price", "weight", "table", "page", "shows", "result", "another", "same", "search", "and", "of", "the"]
ASKED: Message = {"role": "user", "content": "What do they cost, and where is that written?"}


class Look(BaseTool):
    """Its schema is in every prompt."""

    name, description = "look", "Shows a page."
    parameters = {"type": "object", "properties": {"page": {"type": "integer"}}, "required": ["page"]}  # noqa: RUF012

    async def execute(self, state: Any, arguments: Any) -> ToolResult:
        raise NotImplementedError("the benchmark renders results of its own; only the schema is used")


@dataclass
class Talk:
    """One conversation on both sides: `said` is what a template would have to render."""

    chat: ChatTokens
    segment: SegmentBuilder
    said: list[Message]
    turns: int = 0


class Talker:
    """Makes conversations and takes their turns, timed."""

    def __init__(self, chat: ChatTokens, dice: random.Random) -> None:
        self.chat, self._dice = chat, dice
        self.context_tokens: dict[int, int] = {}
        """turn → length of the context that its reply is sampled on, in the newest conversation"""
        self._schemas = [Look().schema]

    def begin(self) -> Talk:
        chat = self.chat.for_episode(Budget(10**6, 10**9))
        return Talk(chat, chat.start([ASKED], self._schemas), [ASKED])

    def take_turn(self, talk: Talk, *, rerender: bool) -> dict[str, float]:
        """side → seconds of the next turn."""
        thought, page, result = self._words(THOUGHT_CHARS), self._dice.randrange(10**6), self._words(RESULT_CHARS)
        call = f'<tool_call>\n{{"name": "look", "arguments": {{"page": {page}}}}}\n</tool_call>'
        ids = self._reply_ids(f"{thought}\n{call}")
        self.context_tokens[talk.turns + 1] = talk.segment.context_len
        took = {"splice": self._splice(talk, ids, result)}
        talk.said += self._messages(thought, page, result)
        talk.turns += 1
        return {**took, "rerender": self._rerender(talk)} if rerender else took

    # sides ---------------------------------------------------------------------------------------------------------
    def _splice(self, talk: Talk, ids: list[int], result: str) -> float:
        began = time.perf_counter()
        asked = talk.segment.context_hash
        reply = Generation(ids, [-0.5] * len(ids), [(0, 0, len(ids))], "stop", text=talk.chat.decode(ids))
        talk.segment.append_sampled(reply)
        calls = talk.chat.tool_calls(reply)
        talk.chat.go_on(talk.segment, reply, tool_messages([ToolResult(result)]))
        took = time.perf_counter() - began
        if len(calls) != 1 or asked == talk.segment.context_hash:
            raise AgentError(f"{len(calls)} calls were read of one")
        return took

    def _rerender(self, talk: Talk) -> float:
        began = time.perf_counter()
        text = talk.chat.template.render(talk.said, self._schemas, prompt=True)
        ids = talk.chat.encode(text)
        took = time.perf_counter() - began
        context = talk.segment.context()
        if talk.chat.decode(context) != text or len(ids) >= len(context):
            raise AgentError("the sides do not hold the same conversation")
        return took

    # what is said --------------------------------------------------------------------------------------------------
    def _words(self, chars: int) -> str:
        return " ".join(self._dice.choice(WORDS) for _ in range(chars // 5))[:chars].strip()

    def _reply_ids(self, text: str) -> list[int]:
        """Pieces between random cuts, each encoded for itself."""
        cuts = sorted(self._dice.sample(range(1, len(text)), CUTS))
        pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
        return [*(token for piece in pieces for token in self.chat.encode(piece)), self.chat.turn_end_id]

    def _messages(self, thought: str, page: int, result: str) -> list[Message]:
        """The turn as messages: what a client that keeps no ids would send."""
        asked = self.chat.template.call_message([ToolCall("look", {"page": page})], thought)
        return [asked, *tool_messages([ToolResult(result)])]
