"""Proves at start that splicing says what the chat template says, on synthetic conversations.

For each conversation: template(history + new messages) must end in the delta that would be spliced; where it also keeps
the history as it was fed and sampled, both texts are equal to the last character. A template that rewrites history
(Qwen3 drops old thinking when a user speaks again) is reported, and the ids stay as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.agent_loops.errors import TemplateError
from penstock.agent_loops.template import Message

if TYPE_CHECKING:
    from penstock.agent_loops.chat import ChatTokens

Tools = Sequence[Mapping[str, Any]]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is 2+2? Ünïcode: 数 🙂"}
TOOL_TEXTS = (("4",), ("",), ("naïve – 数学 🙂\n\ttwo lines",), ("first", "second"), ('{"a": [1, 2]}',))
PLAIN_REPLY = "I shall look."
THINKING_REPLY = "<think>\nLet me see.\n</think>\n\nI shall look."


@dataclass(frozen=True, slots=True)
class Proof:
    """What was checked for one model and its tools."""

    conversations: int
    rewritten: tuple[str, ...]
    """One line per kind of history that the template would write differently from what was sampled."""


def prove(chat: ChatTokens, tools: Tools) -> Proof:
    """Raises `TemplateError`; `chat` may be used with `tools` where it does not."""
    if tools:
        _check_tools_are_shown(chat, tools)
        _check_tool_results_are_shown(chat)
        _check_calls_are_parsed(chat, tools)
    count, rewritten = 0, []
    for name, history, new in _conversations(chat, tools):
        count += 1
        if not _check_splice(chat, tools, name, history, new):
            rewritten.append(name)
    return Proof(count, tuple(dict.fromkeys(rewritten)))


def _check_tools_are_shown(chat: ChatTokens, tools: Tools) -> None:
    text = chat.template.render([USER], tools, prompt=True)
    missing = [tool["function"]["name"] for tool in tools if tool["function"]["name"] not in text]
    if missing:
        raise TemplateError(
            f"the model's chat template ignores tools (not shown: {', '.join(missing)}); "
            "use a model whose template has a tools section, or run without tools"
        )


def _check_tool_results_are_shown(chat: ChatTokens) -> None:
    text = chat.template.after_reply([{"role": "tool", "content": "RESULT4711"}])
    if "RESULT4711" not in text:
        raise TemplateError("the model's chat template ignores messages of role tool: the model would read no results")


def _check_calls_are_parsed(chat: ChatTokens, tools: Tools) -> None:
    name, arguments = tools[0]["function"]["name"], {"probe": "1 < 2"}
    text = chat.template.reply_with_call(tools, {"function": {"name": name, "arguments": arguments}})
    if text is None or name not in text:
        return
    found = [(call.name, call.arguments) for call in chat.parser.parse(text).calls]
    if found != [(name, arguments)]:
        raise TemplateError(f"the parser of tool calls does not read this model's calls; the template writes {text!r}")


def _conversations(chat: ChatTokens, tools: Tools) -> Iterator[tuple[str, list[Message], list[Message]]]:
    """(name, messages up to and with a reply, messages after it)"""
    replies = {"plain reply": PLAIN_REPLY, "reply with thinking": THINKING_REPLY}
    replies |= _call_reply(chat, tools)
    for name, reply in replies.items():
        said = {"role": "assistant", "content": reply}
        followups = _tool_messages() if tools else []
        for new in followups:
            yield f"{name}, then tool results", [USER, said], new
            yield f"{name} under a system prompt, then tool results", [SYSTEM, USER, said], new
            yield f"{name}, second tool turn", [USER, said, *new, said], new
        yield f"{name}, then a user message", [SYSTEM, USER, said], [USER]


def _call_reply(chat: ChatTokens, tools: Tools) -> dict[str, str]:
    if not tools:
        return {}
    function = {"name": tools[0]["function"]["name"], "arguments": {"probe": "ü"}}
    text = chat.template.reply_with_call(tools, {"function": function})
    closing = chat.template.after_reply([], prompt=False)
    return {"tool call": text.removesuffix(closing)} if text else {}


def _tool_messages() -> list[list[Message]]:
    return [[{"role": "tool", "content": text} for text in texts] for texts in TOOL_TEXTS]


def _check_splice(chat: ChatTokens, tools: Tools, name: str, history: list[Message], new: list[Message]) -> bool:
    """True: equal to the last character. False: the template rewrites the history, the delta is right."""
    opening = chat.encode(chat.template.render(history[:-1], tools, prompt=True))
    delta = chat.render(new)
    spliced = chat.decode([*opening, *chat.encode(history[-1]["content"]), *delta])
    wanted = chat.template.render([*history, *new], tools, prompt=True)
    if not wanted.endswith(chat.decode(delta)):
        raise TemplateError(
            f"the chat template cannot be continued on sampled ids ({name}): {_difference(spliced, wanted)}"
        )
    return spliced == wanted


def _difference(spliced: str, wanted: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(spliced, wanted, strict=False)) if a != b), min(len(spliced), len(wanted))
    )
    window = slice(max(0, at - 30), at + 60)
    return f"at character {at} the splice has {spliced[window]!r}, the template {wanted[window]!r}"
