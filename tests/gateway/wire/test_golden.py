"""The exact bytes of /v1/messages, streamed and whole, in `golden/`: clients read events of this order and shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.agent_loops import ChatTokens
from penstock.gateway.wire.messages import parse_messages
from penstock.gateway.wire.messages_answers import MessageStream
from penstock.gateway.wire.reader import AnswerReader, Detokenizer
from penstock.gateway.wire.types import AnswerHead, answer_id
from penstock.gateway.wire.wires import WIRES

GOLDEN = Path(__file__).parent / "golden"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1.0, "b": "é"}}\n</tool_call>'
TOOLS = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}]
CASES = {
    "thinking_text_and_two_calls": (f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}\n{CALL}<|im_end|>", False),
    "opened_thinking": ("hm\n</think>\n\nyes<|im_end|>", True),
    "stop_sequence": ("One.STOP two<|im_end|>", False),
    "cut": ("It was a", False),
    "nothing": ("<|im_end|>", False),
}


def recorded(chat: ChatTokens, detokenizer: Detokenizer, text: str, inside: bool) -> tuple[bytes, bytes]:
    """(events, whole body) of an answer that comes in chunks of five ids."""
    body = {"model": "tiny", "max_tokens": 99, "messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
    request = parse_messages({**body, "stop_sequences": ["STOP"], "stream": True})
    identifier = answer_id("messages", "golden")
    head = AnswerHead(identifier, 1_700_000_000, "tiny", 11, cached_tokens=4, inside_thinking=inside)
    api = WIRES["messages"]
    reader, stream = AnswerReader(request, head, 0, detokenizer), api.stream(request, head)
    ids = chat.encode(text)
    events = [stream.start(), api.keep_alive]
    for at in range(0, len(ids), 5):
        chunk = ids[at : at + 5]
        events.append(stream.feed(0, reader.feed(chunk, [-0.5] * len(chunk))))
    choice = reader.finish("stop" if text.endswith("<|im_end|>") else "length")
    events += [stream.finish(choice), stream.end()]
    whole = json.dumps(api.answer(request, head, [choice]), indent=1, ensure_ascii=False)
    return b"".join(events), whole.encode() + b"\n"


@pytest.mark.parametrize("name", CASES)
def test_messages_are_the_golden_files(
    chat_for: Callable[..., ChatTokens], detokenizer: Detokenizer, name: str
) -> None:
    events, whole = recorded(chat_for(), detokenizer, *CASES[name])
    assert events.decode() == (GOLDEN / f"{name}.sse").read_text()
    assert whole.decode() == (GOLDEN / f"{name}.json").read_text()


def test_a_stream_that_broke_off_ends_with_an_error() -> None:
    request = parse_messages({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]})
    stream = MessageStream(request, AnswerHead("msg_1", 0, "m", 1))
    expected = {"type": "error", "error": {"type": "overloaded_error", "message": "no server left"}}
    assert stream.fail(503, "no server left") == b"event: error\ndata: " + compact(expected) + b"\n\n"


def compact(body: object) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
