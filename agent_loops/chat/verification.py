"""Template verification: checks at start that splicing writes what the chat template writes.

On synthetic conversations, template(history + new messages) must end in the delta that would be spliced. If it also
begins with what was fed before the reply, and the reply in between is complete, the history is kept. Reported are
templates that rewrite history (Qwen3 drops old thinking after a user message) and messages that a template refuses
itself (a system prompt, several results at once). If tool results cannot be spliced, a model with tools is refused; if
a user's next message cannot (Mistral moves the system prompt there), `ChatTokens.render` refuses that role.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from penstock.agent_loops.chat.calls import PROBE, check_calls_are_read
from penstock.agent_loops.chat.chat import ChatTokens
from penstock.agent_loops.chat.images import with_images
from penstock.agent_loops.chat.template import ChatTemplate, Message
from penstock.agent_loops.errors import TemplateError
from penstock.tools.parsers import ToolCall

Tools = Sequence[Any]
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
class TemplateVerification:
    """The result of `verify_template` for one model and its tools."""

    conversations: int
    rewritten: tuple[str, ...]
    """One line per kind of history that the template renders differently from what was sampled."""
    refused: tuple[str, ...] = ()
    """One line per kind of conversation that the template itself refuses, with its reason."""
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Role of a message → why it cannot follow a reply: `ChatTokens.render` raises this reason."""

    def summary(self, thinking_history: str) -> str:
        """One line for the log."""
        parts = [
            f"history it rewrites (thinking_history: {thinking_history}): {', '.join(self.rewritten) or 'none'}",
            f"what it refuses: {'; '.join(self.refused) or 'nothing'}",
            *(f"after a reply no message of role {role}: {why}" for role, why in self.unsupported.items()),
        ]
        return "; ".join(parts)


def verify_template(chat: ChatTokens, tools: Tools = ()) -> TemplateVerification:
    """Checks that splicing on `chat` writes what its template writes, with these tools.

    Roles that cannot follow a reply, such as a user's next message, are recorded in `chat.refused_roles`.
    Raises `TemplateError` naming the first difference.
    """
    if chat.thinking_history == "strip":
        chat.old_thinking.check_strip()
    if chat.rendering.places is not None:
        chat.rendering.places.check(chat.encode)
    chat.refused_roles = {}
    found = _verify(chat, tools)
    chat.refused_roles = found.unsupported
    return found


def _verify(chat: ChatTokens, tools: Tools) -> TemplateVerification:
    if tools:
        _check_tools(chat, tools)
    found = _Findings()
    for case in conversations(chat.template, tools, images=chat.rendering.places is not None):
        _try(chat, tools, case, found)
    needed = "tool" if tools else "user"
    if needed not in found.verified:
        raise TemplateError(
            found.unsupported.get(needed) or f"nothing can follow a reply: {'; '.join(found.refused.values())}"
        )
    if "tool" in found.unsupported:
        raise TemplateError(found.unsupported["tool"])
    count = found.verified.total()
    return TemplateVerification(
        count, tuple(dict.fromkeys(found.rewritten)), tuple(found.refused.values()), found.unsupported
    )


@dataclass(slots=True)
class _Findings:
    verified: Counter[str] = field(default_factory=Counter)
    """By the role of what follows the reply."""
    rewritten: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)


def _try(chat: ChatTokens, tools: Tools, case: TemplateCase, found: _Findings) -> None:
    role = str(case.new[0]["role"])
    try:
        wanted = chat.rendering.prompt_text([*case.history, *case.new], tools)
        delta = chat.decode(chat.render(case.new, tools, case.calls))
        opening = chat.rendering.prompt_text(case.history[:-1], tools)
    except TemplateError as error:
        found.refused.setdefault(case.name, f"{case.name}: {error}")
        return
    if not wanted.endswith(delta) and _moves_words(chat, tools, case, delta):
        found.verified[role] += 1
        found.rewritten.append(f"{case.name} (it moves the words behind the results)")
        return
    if not wanted.endswith(delta):
        difference = _difference(opening + "".join(case.said) + delta, wanted)
        problem = f"the chat template cannot be continued on sampled ids ({case.name}): {difference}"
        found.unsupported.setdefault(role, problem)
        return
    found.verified[role] += 1
    between = wanted[len(opening) : len(wanted) - len(delta)]
    if not (wanted.startswith(opening) and all(piece in between for piece in case.said)):
        found.rewritten.append(case.name)


def _moves_words(chat: ChatTokens, tools: Tools, case: TemplateCase, delta: str) -> bool:
    """The template writes what a reply says beside its calls behind their results (Gemma 4), so that only the delta of
    the calls alone can be compared. Sampled words stay where they are, as all history that a template rewrites."""
    if not case.calls or not case.said or chat.template.call_form is None:
        return False
    bare = [{**message, "content": ""} if message.get("tool_calls") else message for message in case.history]
    try:
        return chat.rendering.prompt_text([*bare, *case.new], tools).endswith(delta)
    except TemplateError:
        return False


def _check_tools(chat: ChatTokens, tools: Tools) -> None:
    _check_tools_are_shown(chat, tools)
    _check_tool_results_are_shown(chat, tools)
    check_calls_are_read(chat.parser, chat.template, tools)


@lru_cache(maxsize=4)
def tools_problem(chat: ChatTokens) -> str:
    """Why this model can be given no tools at all; empty where it can. For tools that are not known at start."""
    try:
        _check_tools(chat, [PROBE])
    except TemplateError as error:
        return str(error)
    return ""


def _check_tools_are_shown(chat: ChatTokens, tools: Tools) -> None:
    text = chat.template.render([USER], tools, prompt=True)
    missing = [tool["function"]["name"] for tool in tools if tool["function"]["name"] not in text]
    if missing:
        raise TemplateError(
            f"the model's chat template ignores tools (not shown: {', '.join(missing)}); "
            "use a model whose template has a tools section, or run without tools"
        )


def _check_tool_results_are_shown(chat: ChatTokens, tools: Tools) -> None:
    result, call = {"role": "tool", "content": RESULT}, ToolCall(tools[0]["function"]["name"])
    delta = chat.continuation.delta([result], [call])
    if RESULT not in delta:
        raise TemplateError("the model's chat template ignores messages of role tool: the model would read no results")
    if chat.continuation.delta([result], [call], tools) != delta:
        raise TemplateError("the chat template shows tools again after a call; such results cannot be spliced")


def _difference(spliced: str, wanted: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(spliced, wanted, strict=False)) if a != b), min(len(spliced), len(wanted))
    )
    window = slice(max(0, at - 30), at + 60)
    return f"at character {at} the splice has {spliced[window]!r}, the template {wanted[window]!r}"


@dataclass(frozen=True, slots=True)
class TemplateCase:
    """One conversation: `history` ends in a reply, `new` comes after it."""

    name: str
    history: Sequence[Message]
    new: Sequence[Message]
    said: Sequence[str]
    """Pieces of the reply that a template which keeps history writes."""
    calls: Sequence[ToolCall] = ()


def conversations(
    template: ChatTemplate, tools: Sequence[Mapping[str, Any]], *, images: bool = False
) -> Iterator[TemplateCase]:
    """Without tools: what a user says next. With tools also results of one and of several calls, once and again.

    `images`: both also with images, of which the history has one already.
    """
    if images:
        yield from _with_images(template, tools)
    for name, content, said in (("plain reply", PLAIN, [PLAIN]), ("reply with thinking", THINKING, [THOUGHT, PLAIN])):
        reply = {"role": "assistant", "content": content}
        yield TemplateCase(f"{name}, then a user message", [USER, reply], [USER], said)
        yield TemplateCase(f"{name} under a system prompt, then a user message", [SYSTEM, USER, reply], [USER], said)
        yield TemplateCase(f"{name}, second user turn", [USER, reply, USER, reply], [USER], said)
    if tools:
        for name, content, said in (
            ("call", "", []),
            ("call after words", PLAIN, [PLAIN]),
            ("call after thinking", THINKING, [THOUGHT]),
        ):
            yield from _with_results(template, tools, name, content, said)


def _with_images(template: ChatTemplate, tools: Sequence[Mapping[str, Any]]) -> Iterator[TemplateCase]:
    shown = {"role": "user", "content": with_images("What is this?", [PICTURE])}
    reply = {"role": "assistant", "content": PLAIN}
    yield TemplateCase("reply to an image, then another image", [shown, reply], [shown], [PLAIN])
    if tools:
        calls = [_call(tools, 0)]
        (result,) = _results(template, calls, [RESULT])
        seen = {**result, "content": with_images(RESULT, [PICTURE])}
        yield TemplateCase(
            "call, then a tool result with an image", [shown, _reply(template, calls, "")], [seen], [], calls
        )


def _with_results(
    template: ChatTemplate, tools: Sequence[Mapping[str, Any]], name: str, content: str, said: Sequence[str]
) -> Iterator[TemplateCase]:
    for texts in TOOL_TEXTS:
        calls = [_call(tools, index) for index in range(len(texts))]
        reply, new = _reply(template, calls, content), _results(template, calls, texts)
        pieces = [*said, *(call.name for call in calls if template.call_form)]
        after = f"then {'several tool results' if len(texts) > 1 else 'tool results'}"
        yield TemplateCase(f"{name}, {after}", [USER, reply], new, pieces, calls)
        yield TemplateCase(f"{name} under a system prompt, {after}", [SYSTEM, USER, reply], new, pieces, calls)
        yield TemplateCase(f"{name}, {after}, second tool turn", [USER, reply, *new, reply], new, pieces, calls)


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
        {
            "role": "tool",
            "content": text,
            "name": call.name,
            "tool_call_id": template.call_id(call.call_id, index, call.name),
        }
        for index, (text, call) in enumerate(zip(texts, calls, strict=True))
    ]
