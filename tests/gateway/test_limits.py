"""Requests that are too long, or that the tokenizer cannot read, cost their sender alone."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from tests.gateway.conftest import USER, MakeBench, say
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.agent_loops import ChatTokens
from penstock.gateway.context import longest_token
from penstock.gateway.errors import TooLong
from penstock.gateway.routes import parse_body
from penstock.gateway.sessions import SessionManager
from penstock.gateway.wire.types import InvalidRequest
from penstock.gateway.wire.wires import WIRES
from penstock.tools.parsers import get_parser

SPACE = b" " * 200_000
"""Makes a body long."""


def panicking(tokenizer: Any) -> ChatTokens:
    """A tokenizer whose regular expression takes exponential time on a run of Q: the library then panics."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    split = pre_tokenizers.Split(Regex("(Q+)+b"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=tokenizer.chat_template
    )
    return ChatTokens(made, get_parser("hermes"))


@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_panic_of_tokenizer_is_refused(make_bench: MakeBench, tokenizer_for: Any, api: str) -> None:
    bench = await make_bench("It is 46.")
    bench.parts = replace(bench.parts, chat=panicking(tokenizer_for("qwen2_5")))
    episode = await bench.restart().open(0.0)
    body = {"prompt": "Q" * 60} if api == "completions" else {}
    with pytest.raises(InvalidRequest, match="tokenizer cannot encode") as refused:
        await say(episode, [{"role": "user", "content": "Q" * 60}], api=api, **body)
    assert refused.value.field == ("messages" if api == "chat" else "prompt")
    assert (await say(episode)).content == "It is 46."


@pytest.mark.parametrize("body", [{}, {"api": "completions", "prompt": "Q" * 60_000}])
async def test_too_long_text_is_not_tokenized(make_bench: MakeBench, tokenizer_for: Any, body: Any) -> None:
    bench = await make_bench()
    chat = panicking(tokenizer_for("qwen2_5"))
    bench.parts = replace(
        bench.parts, chat=chat, context_limit=lambda: 2048, longest_token=longest_token(chat.tokenizer)
    )
    episode = await SessionManager(bench.parts, 30.0).open(0.0)
    with pytest.raises(TooLong, match=r"context is 2048 tokens.*60000 characters"):
        await say(episode, [{"role": "user", "content": "Q" * 59_996}], **body)


async def test_too_many_ids_are_not_read(make_bench: MakeBench) -> None:
    bench = await make_bench()
    bench.parts = replace(bench.parts, context_limit=lambda: 2048)
    episode = await bench.restart().open(0.0)
    with pytest.raises(TooLong, match="2048 tokens"):
        await say(episode, api="completions", prompt=[5] * 2048)


async def test_long_request_lets_others_pass(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other episode's call is answered while the tokenizer is in the middle of the long text."""
    bench = await make_bench("A", "B")
    long, short = await bench.open(), await bench.open()
    entered, answered = threading.Event(), threading.Event()
    encode = bench.parts.chat.rendering.encode

    def encode_slowly(text: str) -> list[int]:
        if len(text) > 500_000:
            entered.set()
            assert answered.wait(60), "the event loop waits for the tokenizer"
        return encode(text)

    monkeypatch.setattr(bench.parts.chat.rendering, "encode", encode_slowly)
    slow = asyncio.create_task(say(long, [{"role": "user", "content": "word " * 200_000}]))
    assert await asyncio.to_thread(entered.wait, 60)
    await say(short, [USER])
    answered.set()
    await slow
    lengths = [len(request.token_ids) for request in bench.client.requests]
    assert lengths == sorted(lengths)


@pytest.mark.parametrize(
    "body", [b"[" + b"[]," * 1_000_000 + b"[]]", b'[{"a":1}' * 1_000_001], ids=["lists", "objects"]
)
async def test_a_body_of_too_many_lists_is_not_parsed(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="1000000 lists and objects"):
        await parse_body(WIRES["chat"].parse, body + SPACE)


async def test_two_long_bodies_are_parsed_at_once() -> None:
    began, release = threading.Semaphore(0), threading.Event()

    def parse(body: Any) -> Any:
        began.release()
        assert release.wait(60)
        return body

    parsing = [asyncio.create_task(parse_body(parse, b"[]" + SPACE)) for _ in range(4)]
    for _ in range(2):
        assert await asyncio.to_thread(began.acquire, timeout=60)
    third = began.acquire(timeout=0.2)
    release.set()
    assert await asyncio.gather(*parsing) == [[]] * 4
    assert not third
