"""An engine in this process that answers in words: it calls a tool or thinks where it is told to, else it repeats.

What it says depends on its context alone, in tokens that no tokenizer would choose: three characters at a time.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from penstock.agent_loops import ChatTokens
from penstock.agent_loops.chat import load_tokenizer
from penstock.rollout_server import (
    Chunk,
    EngineError,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    RolloutConfig,
    fit_request,
)
from penstock.testing import FakeEngine
from penstock.tools.parsers import get_parser


def say(text: str) -> str:
    """The answer to a context."""
    *_, last = text.removesuffix("<|im_start|>assistant\n").split("<|im_start|>")
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", last, re.DOTALL)
    if results:
        return "The answer is " + " and ".join(results) + "."
    content = last.removeprefix("user\n").removesuffix("<|im_end|>\n")
    if content.startswith("Think"):
        return f"<think>\n{content}\n</think>\n\nDone. \n"
    calls = re.findall(r"\d+\+\d+", content) if content.startswith("Call") else []
    written = '<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{}"}}}}\n</tool_call>'
    return "\n".join(["Let me see.", *map(written.format, calls)]) if calls else f"You said: {content} 数🙂"


class TalkingEngine(FakeEngine):
    """`model` is a folder with a tokenizer. A sampling seed shows in the answer."""

    def __init__(self, config: RolloutConfig, model: str, log_dir: Path, seed: int, *, token_s: float = 0.0) -> None:
        super().__init__(config, model, log_dir, seed, token_s=token_s)
        self.chat = ChatTokens(load_tokenizer(model), get_parser("hermes"))
        self.asked: list[GenerateRequest] = []
        self.said: list[list[int]] = []
        """Ids given out, by request, as far as they were taken."""

    async def start(self) -> EngineInfo:
        info = await super().start()
        return info.model_copy(update={"vocab_size": len(self.chat.tokenizer), "max_model_len": 2048})

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        sampling = fit_request(request, await self.start()).sampling
        ids = self.ids_of(request)
        given: list[int] = []
        self.asked.append(request)
        self.said.append(given)
        self.running += 1
        try:
            for position, token in enumerate(ids[: sampling.max_new_tokens]):
                await asyncio.sleep(self.token_s)
                if self._dead.is_set():
                    raise EngineError("the talking engine crashed")
                last = position + 1 == min(len(ids), sampling.max_new_tokens)
                reason: FinishReason = "stop" if len(ids) <= sampling.max_new_tokens else "length"
                given.append(token)
                yield Chunk(
                    token_ids=[token], logprobs=[-0.25], version_spans=[(self.version, 0, 1)],
                    finish_reason=reason if last else None,
                )  # fmt: skip
        finally:
            self.running -= 1

    def ids_of(self, request: GenerateRequest) -> list[int]:
        """An answer that was begun goes on where it stopped."""
        context, begun = request.token_ids, []
        text = self.chat.decode(context)
        opening = text.rfind("<|im_start|>assistant\n") + len("<|im_start|>assistant\n")
        if begun_text := text[opening:]:
            begun, text = [begun_text], text[:opening]
        whole = say(text) + ("" if request.sampling.seed is None else f" ({request.sampling.seed})")
        rest = whole[len("".join(begun)) :]
        pieces = [rest[at : at + 3] for at in range(0, len(rest), 3)]
        return [*(token for piece in pieces for token in self.chat.encode(piece)), self.chat.turn_end_id]


def tool_result(expression: Any) -> str:
    return str(sum(int(term) for term in expression.split("+")))
