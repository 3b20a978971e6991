"""Scripted answers over the real wire: real tokenizer, real parser, the real `openai` client in front."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel

from penstock.agent_loops import ChatTokens
from penstock.gateway.context import detokenizer as detokenizer_of
from penstock.gateway.wire.reader import AnswerReader, CallSyntax, Detokenizer
from penstock.gateway.wire.types import AnswerHead, Choice, CompletionRequest, InvalidRequest, answer_id
from penstock.gateway.wire.wires import Wire, wire_at
from penstock.tools.parsers import get_parser


def check_known(answer: BaseModel) -> None:
    """Every field is one of the package's own type, at any depth."""
    assert not answer.model_extra, answer
    for value in vars(answer).values():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, BaseModel):
                check_known(one)


def text_of_chat(chat: ChatTokens) -> Detokenizer:
    return replace(detokenizer_of(chat), syntax=CallSyntax(get_parser("hermes")))


@pytest.fixture(scope="session")
def detokenizer(chat_for: Callable[..., ChatTokens]) -> Detokenizer:
    return text_of_chat(chat_for())


@dataclass
class Scripted:
    """Serves a request with the next scripted answers, one per choice; `asks` and `choices` keep what went on."""

    chat: ChatTokens
    answers: Iterator[str]
    chunk_ids: int = 1
    limit_ids: int = 10_000
    inside_thinking: bool = False
    asks: list[CompletionRequest] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    choices: list[list[Choice]] = field(default_factory=list)

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.bodies.append(json.loads(request.content))
        found = wire_at(request.url.path.removeprefix("/v1/"))
        assert found
        try:
            return self.answered(found, self.bodies[-1])
        except InvalidRequest as error:
            return httpx2.Response(400, json=found.errors.body(400, str(error), error.field or None, error.code))

    def answered(self, api: Wire, body: dict[str, Any]) -> httpx2.Response:
        ask = api.parse(body)
        self.asks.append(ask)
        identifier = answer_id(ask.api, str(len(self.asks)))
        head = AnswerHead(identifier, 1_700_000_000, "tiny", 11, inside_thinking=self.inside_thinking)
        content = b"".join(self.events(ask, head, api.stream(ask, head)))
        if ask.stream:
            return httpx2.Response(200, content=content, headers={"content-type": "text/event-stream"})
        return httpx2.Response(200, json=api.answer(ask, head, self.choices[-1]))

    def events(self, ask: CompletionRequest, head: AnswerHead, stream: Any) -> Iterator[bytes]:
        """The choices take turns, a few ids each."""
        detokenizer = text_of_chat(self.chat)
        readers = [AnswerReader(ask, head, index, detokenizer) for index in range(ask.n)]
        left = [self.chat.encode(next(self.answers)) for _ in readers]
        reasons = ["length" if len(ids) > self.limit_ids else "stop" for ids in left]
        left = [ids[: self.limit_ids] for ids in left]
        yield stream.start()
        while any(left):
            for index, reader in enumerate(readers):
                ids, left[index] = left[index][: self.chunk_ids], left[index][self.chunk_ids :]
                yield stream.feed(index, reader.feed(ids, [-0.25 - i for i in range(len(ids))]))
        self.choices.append([reader.finish(reason) for reader, reason in zip(readers, reasons, strict=True)])
        for choice in reversed(self.choices[-1]):
            yield stream.finish(choice)
        yield stream.end()

    def client(self) -> AsyncOpenAI:
        transport = httpx2.MockTransport(self)
        http = httpx2.AsyncClient(transport=transport)
        return AsyncOpenAI(base_url="http://episode/v1", api_key="key", http_client=http, max_retries=0)

    def anthropic(self) -> AsyncAnthropic:
        http = httpx2.AsyncClient(transport=httpx2.MockTransport(self))
        return AsyncAnthropic(base_url="http://episode", api_key="key", http_client=http, max_retries=0)


@pytest.fixture
def scripted(chat_for: Callable[..., ChatTokens]) -> Callable[..., Scripted]:
    def make(*answers: str, repeat: int = 2, **settings: Any) -> Scripted:
        """`repeat` 2: the same answers for a request that streams and one that does not."""
        return Scripted(chat_for(), iter(answers * repeat), **settings)

    return make
