"""An engine and a tool that answer after a log-normal time, and what an agent worker does with them.

The same latencies whatever the load: what is measured is the worker, not what it waits for.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from penstock.agent_loops import ChatTokens
from penstock.rollout_server import Chunk, GenerateRequest, Generation
from penstock.tools import BaseTool, ToolResult
from penstock.transfer_queue import Task

SIGMA = 0.8
"""Of the logarithm of a latency: one in a hundred takes 6.4 times the median."""
LAST_TURN = 0.2
"""Share of answers that call no tool. Episodes are geometric in length, so that their mix is the same at any time."""
TOOL_SHARE = 0.1
"""Of a turn's mean time."""
ANSWER_TOKENS, RESULT_CHARS = 128, 200


class Clock:
    """Sleeps of a log-normal length, all of which can be stopped in the middle and never end then."""

    def __init__(self, seed: int) -> None:
        self.mean_s = 0.0
        self._random = random.Random(seed)
        self._sleepers: dict[asyncio.Future[None], asyncio.TimerHandle] = {}
        self._stopped = False

    async def sleep(self) -> None:
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        if not self._stopped:
            self._sleepers[woken] = loop.call_later(self._draw_s(), _wake, woken)
        try:
            await woken
        finally:
            handle = self._sleepers.pop(woken, None)
            if handle is not None:
                handle.cancel()

    def _draw_s(self) -> float:
        return self._random.lognormvariate(math.log(self.mean_s) - SIGMA**2 / 2, SIGMA)

    def stop(self) -> None:
        """Nobody who sleeps, or falls asleep from now on, wakes again."""
        self._stopped = True
        for handle in self._sleepers.values():
            handle.cancel()
        self._sleepers.clear()


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


class SlowEngine:
    """A `GenerateClient`: `ANSWER_TOKENS` ids per answer, which call the tool, or in the last turn do not."""

    def __init__(self, clock: Clock, chat: ChatTokens, seed: int) -> None:
        self.turns = 0
        self.waiting = 0
        """Requests that sleep now."""
        self.tokens_waiting = 0
        """Of their contexts."""
        self._clock = clock
        self._random = random.Random(seed)
        self._call = _padded(chat, json_call("look", {"at": "the next page of the book"}))
        self._answer = _padded(chat, "The answer is 46.<|im_end|>")

    async def generate(self, request: GenerateRequest) -> Generation:
        length = len(request.token_ids)
        self.waiting, self.tokens_waiting = self.waiting + 1, self.tokens_waiting + length
        try:
            await self._clock.sleep()
        finally:
            self.waiting, self.tokens_waiting = self.waiting - 1, self.tokens_waiting - length
        self.turns += 1
        ids = list(self._answer if self._random.random() < LAST_TURN else self._call)
        return Generation(ids, [-0.5] * len(ids), [(0, 0, len(ids))], "stop")

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        answer = await self.generate(request)
        yield Chunk(
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            version_spans=answer.version_spans,
            finish_reason="stop",
        )

    async def best_version(self) -> int | None:
        return 0


class SlowTool(BaseTool):
    """Keeps a state per episode, as tools with a sandbox do. No two results are alike."""

    name = "look"
    description = "Looks at something."
    parameters: Mapping[str, Any] = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._given = 0

    async def create(self, task: Task) -> list[str]:
        return []

    async def execute(self, state: list[str], arguments: Mapping[str, Any]) -> ToolResult:
        await self._clock.sleep()
        state.append(arguments["at"])
        self._given += 1
        return ToolResult(f"{self._given:09d} " + "word " * (RESULT_CHARS // 5 - 2))


def json_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as the parser ``hermes`` reads it, with the end of the reply."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call><|im_end|>"


def _padded(chat: ChatTokens, text: str) -> Sequence[int]:
    """`text` behind so much thinking that the answer has `ANSWER_TOKENS` ids."""
    ids, word = chat.encode(text), chat.encode("a ")
    thinking = (word * ANSWER_TOKENS)[: max(0, ANSWER_TOKENS - len(ids))]
    return [*thinking, *ids]
