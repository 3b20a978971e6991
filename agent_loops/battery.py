"""The synthetic conversations on which a chat template is proven."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.agent_loops.images import with_images
from penstock.agent_loops.template import ChatTemplate, Message
from penstock.tools.parsers import ToolCall

SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "What is 2+2? Ünïcode: 数 🙂"}
RESULT = "RESULT4711"
TOOL_TEXTS = (("4",), ("",), ("naïve – 数学 🙂\n\ttwo lines",), ("first", "second"), ('{"a": [1, 2]}',))
PLAIN = "I shall look."
THOUGHT = "Let me see."
PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAIAAAD8GO2jAAAAKklEQVR42u3NMQEAAAQAMATRP4pYSvBtBZbTHZ8qngkEAoFAIBAI"
    "BIIrC+AFAUQz669uAAAAAElFTkSuQmCC"
)
"""32 x 32 pixels, red."""
THINKING = f"<think>\n{THOUGHT}\n</think>\n\n{PLAIN}"


@dataclass(frozen=True, slots=True)
class Case:
    """One conversation: `history` ends in a reply, `new` comes after it."""

    name: str
    history: Sequence[Message]
    new: Sequence[Message]
    said: Sequence[str]
    """Pieces of the reply that a template which keeps history writes."""
    calls: Sequence[ToolCall] = ()


def conversations(
    template: ChatTemplate, tools: Sequence[Mapping[str, Any]], *, images: bool = False
) -> Iterator[Case]:
    """Without tools: what a user says next. With tools also results of one and of several calls, once and again.

    `images`: both also with images, of which the history has one already.
    """
    if images:
        yield from _with_images(template, tools)
    for name, content, said in (("plain reply", PLAIN, [PLAIN]), ("reply with thinking", THINKING, [THOUGHT, PLAIN])):
        reply = {"role": "assistant", "content": content}
        yield Case(f"{name}, then a user message", [USER, reply], [USER], said)
        yield Case(f"{name} under a system prompt, then a user message", [SYSTEM, USER, reply], [USER], said)
        yield Case(f"{name}, second user turn", [USER, reply, USER, reply], [USER], said)
    if tools:
        for name, content, said in (
            ("call", "", []),
            ("call after words", PLAIN, [PLAIN]),
            ("call after thinking", THINKING, [THOUGHT]),
        ):
            yield from _with_results(template, tools, name, content, said)


def _with_images(template: ChatTemplate, tools: Sequence[Mapping[str, Any]]) -> Iterator[Case]:
    shown = {"role": "user", "content": with_images("What is this?", [PICTURE])}
    reply = {"role": "assistant", "content": PLAIN}
    yield Case("reply to an image, then another image", [shown, reply], [shown], [PLAIN])
    if tools:
        calls = [_call(tools, 0)]
        (result,) = _results(template, calls, [RESULT])
        seen = {**result, "content": with_images(RESULT, [PICTURE])}
        yield Case("call, then a tool result with an image", [shown, _reply(template, calls, "")], [seen], [], calls)


def _with_results(
    template: ChatTemplate, tools: Sequence[Mapping[str, Any]], name: str, content: str, said: Sequence[str]
) -> Iterator[Case]:
    for texts in TOOL_TEXTS:
        calls = [_call(tools, index) for index in range(len(texts))]
        reply, new = _reply(template, calls, content), _results(template, calls, texts)
        pieces = [*said, *(call.name for call in calls if template.call_form)]
        after = f"then {'several tool results' if len(texts) > 1 else 'tool results'}"
        yield Case(f"{name}, {after}", [USER, reply], new, pieces, calls)
        yield Case(f"{name} under a system prompt, {after}", [SYSTEM, USER, reply], new, pieces, calls)
        yield Case(f"{name}, {after}, second tool turn", [USER, reply, *new, reply], new, pieces, calls)


def _call(tools: Sequence[Mapping[str, Any]], index: int) -> ToolCall:
    name = tools[index % len(tools)]["function"]["name"]
    return ToolCall(name, {"probe": "ü"}, f"call0000{index}")


def _reply(template: ChatTemplate, calls: Sequence[ToolCall], content: str) -> Message:
    """A template that writes no calls takes them as the text that they are."""
    if template.call_form is not None:
        return template.call_message(calls, content)
    return {"role": "assistant", "content": content or PLAIN}


def _results(template: ChatTemplate, calls: Sequence[ToolCall], texts: Sequence[str]) -> list[Message]:
    return [
        {"role": "tool", "content": text, "name": call.name, "tool_call_id": template.call_id(call.call_id, index)}
        for index, (text, call) in enumerate(zip(texts, calls, strict=True))
    ]
