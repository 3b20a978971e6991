"""The synthetic conversations on which a chat template is verified: replies, calls and their results, again and again.

Each call has an id that no other one of its conversation has: a template may look up by it which call a result answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.agent_loops.chat.chat import ChatTokens
from penstock.agent_loops.chat.images import take, with_images
from penstock.agent_loops.chat.template import ChatTemplate, Message, Tools, shared_length
from penstock.agent_loops.errors import TemplateError
from penstock.tools.parsers import ToolCall

SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "What is 2+2? Ünïcode: 数 🙂"}
AGAIN: Message = {"role": "user", "content": "And 3+3?"}
RESULT = "RESULT4711"
PLAIN = "I shall look."
THOUGHT = "Let me see."
PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAIAAAD8GO2jAAAAKklEQVR42u3NMQEAAAQAMATRP4pYSvBtBZbTHZ8qngkEAoFAIBAI"
    "BIIrC+AFAUQz669uAAAAAElFTkSuQmCC"
)
"""32 x 32 pixels, red."""
THINKING = f"<think>\n{THOUGHT}\n</think>\n\n{PLAIN}"


@dataclass(frozen=True, slots=True)
class TemplateCase:
    """One conversation: `history` ends in a reply, `new` comes after it."""

    name: str
    history: Sequence[Message]
    new: Sequence[Message]
    pieces: Sequence[str]
    """Pieces of the reply that a template which keeps history writes."""
    calls: Sequence[ToolCall] = ()
    """The calls as the model would have written them."""


def conversations(chat: ChatTokens, tools: Tools, *, images: bool = False) -> Iterator[TemplateCase]:
    """Without tools: what a user says next. With tools also results of one and of several calls, once and again.

    `images`: both also with images, of which the history has one already.
    """
    if images:
        yield from _with_images(chat, tools)
    for name, content, pieces in (("plain reply", PLAIN, [PLAIN]), ("reply with thinking", THINKING, [THOUGHT, PLAIN])):
        reply = {"role": "assistant", "content": content}
        for under, history in (("", [USER, reply]), (" under a system prompt", [SYSTEM, USER, reply])):
            yield TemplateCase(f"{name}{under}, then a user message", history, [AGAIN], pieces)
        yield TemplateCase(f"{name}, second user turn", [USER, reply, AGAIN, reply], [USER], pieces)
    if tools:
        for name, content, pieces in (
            ("call", "", []),
            ("call after words", PLAIN, [PLAIN]),
            ("call after thinking", THINKING, [THOUGHT]),
        ):
            yield from _with_results(chat, tools, name, content, pieces)


def _with_images(chat: ChatTokens, tools: Tools) -> Iterator[TemplateCase]:
    shown = {"role": "user", "content": with_images("What is this?", [PICTURE])}
    reply = {"role": "assistant", "content": PLAIN}
    yield TemplateCase("reply to an image, then another image", [shown, reply], [shown], [PLAIN])
    if tools:
        calls = _calls(chat, tools, [shown], 0, 1)
        (result,) = results_of(chat.template, calls, [RESULT])
        seen = {**result, "content": with_images(RESULT, [PICTURE])}
        history = [shown, _reply(chat.template, calls, "")]
        yield TemplateCase("call, then a tool result with an image", history, [seen], [], calls)


def _with_results(
    chat: ChatTokens, tools: Tools, name: str, content: str, reply_pieces: Sequence[str]
) -> Iterator[TemplateCase]:
    template = chat.template
    for texts in (("4",), ("",), ("naïve – 数学 🙂\n\ttwo lines",), ("first", "second"), ('{"a": [1, 2]}',)):
        count = len(texts)
        calls = _calls(chat, tools, [USER], 0, count)
        reply, new = _reply(template, calls, content), results_of(template, calls, texts)
        later = _calls(chat, tools, [USER, reply, *new], count, count)
        again, newer = _reply(template, later, content), results_of(template, later, texts)
        after = f"then {'several tool results' if count > 1 else 'tool results'}"
        for title, history, results, case_calls in (
            (f"{name}, {after}", [USER, reply], new, calls),
            (f"{name} under a system prompt, {after}", [SYSTEM, USER, reply], new, calls),
            (f"{name}, {after}, second tool turn", [USER, reply, *new, again], newer, later),
        ):
            pieces = [*reply_pieces, *(call.name for call in case_calls if template.call_form)]
            yield TemplateCase(title, history, results, pieces, case_calls)


def _calls(chat: ChatTokens, tools: Tools, history: Sequence[Message], first: int, count: int) -> list[ToolCall]:
    """Calls `first` and following of a conversation, behind `history`, each with an id that no other one has.

    Where the model writes ids, they are those of a model that writes as the template does, none that follows from the
    position of a call: results refer to those if a parser drops the model's own.
    """
    calls = []
    for number in range(first, first + count):
        name = tools[number % len(tools)]["function"]["name"]
        calls.append(ToolCall(name, {"probe": "ü"}, chat.template.call_id(f"written{number:02d}", number, name)))
    reply = _reply(chat.template, calls, "")
    try:
        opening, closed = chat.rendering.prompt_text(history, tools), text_of(chat, tools, [*history, reply])
    except TemplateError:
        return calls
    read = chat.parser.parse(closed[shared_length(opening, closed) :], tools).calls
    if len(read) != len(calls):
        return calls
    written = [one.written_id for one in read]
    return [
        replace(call, call_id=own or call.call_id, written_id=own) for call, own in zip(calls, written, strict=True)
    ]


def _reply(template: ChatTemplate, calls: Sequence[ToolCall], content: str) -> Message:
    """A template that writes no calls takes them as the text that they are."""
    if template.call_form is not None:
        return template.call_message(calls, content)
    return {"role": "assistant", "content": content or PLAIN}


def results_of(template: ChatTemplate, calls: Sequence[ToolCall], texts: Sequence[str]) -> list[Message]:
    return [
        {
            "role": "tool",
            "content": text,
            "name": call.name,
            "tool_call_id": template.call_id(call.call_id, at, call.name),
        }
        for at, (text, call) in enumerate(zip(texts, calls, strict=True))
    ]


def text_of(chat: ChatTokens, tools: Tools, messages: Sequence[Message]) -> str:
    """A conversation that asks for no reply."""
    return chat.template.render(chat.template.fitted(take(messages, {})), tools, prompt=False)
