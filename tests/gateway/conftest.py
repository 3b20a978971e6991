"""Recorded episodes on a memory queue, with a policy that says what a test tells it to."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from tests.agent_loops.conftest import calling_policy, chat_for, parts_of, queue_of, tasks_of, tokenizer_for  # noqa: F401

from penstock.agent_loops import AgentConfig, ChatTokens
from penstock.gateway.context import GatewayContext, detokenizer
from penstock.gateway.session import GatewaySession
from penstock.gateway.sessions import SessionManager
from penstock.gateway.wire.messages_answers import message_body
from penstock.gateway.wire.types import AnswerHead, Choice, CompletionRequest
from penstock.gateway.wire.wires import WIRES
from penstock.testing import FakeClient, MemoryTransferQueue
from penstock.transfer_queue import DataCursor, Limits, Task, Trajectory

USER = {"role": "user", "content": "What is 12+34?"}
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}]
CUSTOM_TOOLS = [{"name": "calculator", "input_schema": {"type": "object", "properties": {}}}]
"""`TOOLS` in Anthropic's format."""


def call_text(expression: str) -> str:
    return f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


@dataclass
class Says:
    """The texts that the model says next, each cut into tokens at random places and closed; "…" is not closed."""

    chat: ChatTokens
    texts: list[str] = field(default_factory=list)
    random: random.Random = field(default_factory=lambda: random.Random(7))

    def __call__(self, _context: list[int]) -> list[int]:
        text = self.texts.pop(0) if self.texts else f"Nothing more {self.random.random()}."
        cuts = sorted(self.random.randrange(len(text) + 1) for _ in range(4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return [*(token for piece in pieces for token in self.chat.encode(piece)), self.chat.turn_end_id]


class Remembers(FakeClient):
    """Keeps its answers beside its requests, as the engine's own record."""

    def __init__(self, reply: Callable[[list[int]], Sequence[int]]) -> None:
        super().__init__(reply)
        self.answers: list[list[int]] = []

    async def generate(self, request: Any) -> Any:
        answer = await super().generate(request)
        self.answers.append(list(answer.token_ids))
        return answer


class Bench:
    """A queue, a model and one sidecar's desk; `restart` is its kill -9."""

    def __init__(self, chat: ChatTokens, config: AgentConfig, reward: Any = None, limits: Limits | None = None) -> None:
        self.says = Says(chat)
        self.client = Remembers(self.says)
        self.queue = MemoryTransferQueue()
        self.limits = limits or Limits(group_size=2, groups_per_step=1, max_staleness=8, lease_ttl_s=600.0)
        self.parts = GatewayContext(
            "s0", config, self.queue, self.client, chat, detokenizer(chat), "tiny", reward=reward
        )
        self.manager = SessionManager(self.parts, 30.0)

    async def start(self, tasks: int = 1) -> None:
        await self.queue.create_run(self.limits, "config: 1")
        made = [Task(f"train/{i:04d}", "train", [USER], "sums", "46") for i in range(tasks)]
        await self.queue.submit(made, cursor=DataCursor(0, tasks))

    def restart(self) -> SessionManager:
        """Another sidecar, or this one after kill -9: it knows nothing but the queue."""
        self.manager = SessionManager(self.parts, 30.0)
        return self.manager

    async def open(self) -> GatewaySession:
        return await self.manager.open(0.0)

    async def journal(self, episode: GatewaySession) -> list[Any]:
        return list((await self.queue.adopt(episode.lease.episode_id, episode.lease.fence)).journal)

    async def trajectory(self, episode: GatewaySession, reward: float = 1.0, outcome: Any = None) -> Trajectory:
        """Finish it, and what the trainer gets."""
        await episode.note(reward=reward)
        await self.manager.finish(episode.handle, outcome)
        (trajectory,) = await self.queue.read([episode.lease.episode_id])
        return trajectory


def asked(messages: Sequence[Any] = (USER,), api: str = "chat", **fields: Any) -> Any:
    body = {"model": "tiny", **fields}
    if api in ("chat", "messages"):
        body["messages"] = list(messages)
    if api == "messages":
        body.setdefault("max_tokens", 400)
    return WIRES[api].parse(body)


async def say(episode: GatewaySession, messages: Sequence[Any] = (USER,), **fields: Any) -> Choice:
    """The first choice."""
    retried = fields.pop("retried", False)
    return (await (await episode.answer(asked(messages, **fields), retried=retried)).whole())[0]


def back(choice: Choice) -> dict[str, Any]:
    """The answer as the `openai` package's model_dump() sends it back."""
    import json

    message: dict[str, Any] = {"role": "assistant", "content": choice.content or None, "refusal": None}
    if choice.calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), separators=(",", ":"))},
            }
            for call in choice.calls
        ]
    return message


def blocks_back(head: AnswerHead, choice: Choice) -> dict[str, Any]:
    """The answer as a client of Anthropic's in JavaScript sends it back: 5.0 is 5 there, and defaults are filled in."""
    body = message_body(CompletionRequest("messages", "tiny"), head, [choice])
    content = [_in_javascript(block) for block in body["content"]]
    for block in content:
        if block["type"] == "tool_use":
            block["input"]["by_default"] = False
    return {"role": "assistant", "content": content}


def _in_javascript(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _in_javascript(one) for name, one in reversed(value.items())}
    if isinstance(value, list):
        return [_in_javascript(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def whole(segment: Any) -> list[int]:
    return np.concatenate([segment.prompt_ids, segment.response_ids]).tolist()


def sampled(segment: Any) -> list[int]:
    return segment.response_ids[segment.response_mask == 1].tolist()


MakeBench = Callable[..., Awaitable[Bench]]


@pytest.fixture
async def make_bench(chat_for: Callable[..., ChatTokens]) -> AsyncIterator[MakeBench]:
    made: list[Bench] = []

    async def make(*texts: str, tasks: int = 1, template: str = "qwen2_5", reward: Any = None, **config: Any) -> Bench:
        settings = {"max_turns": 50, "max_response_tokens": 20_000, "max_new_tokens": 400, **config}
        bench = Bench(chat_for(template), AgentConfig(**settings), reward)
        bench.says.texts += texts
        await bench.start(tasks)
        made.append(bench)
        return bench

    yield make
    for bench in made:
        await bench.manager.close()
