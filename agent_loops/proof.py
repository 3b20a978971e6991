"""Proves at start that splicing says what the chat template says, on synthetic conversations.

For each conversation: template(history + new messages) must end in the delta that would be spliced. Where it also
begins with what was fed before the reply, and the reply in between still holds everything that was said, the history is
kept. A template that rewrites history (Qwen3 drops old thinking when a user speaks again) is reported, and so are
messages that it refuses by itself (a system prompt, several results at once). Where tool results cannot be spliced, a
model with tools is refused; where a user's next message cannot (Mistral moves the system prompt there), that is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.agent_loops.battery import RESULT, USER, Case, conversations
from penstock.agent_loops.errors import TemplateError
from penstock.tools.parsers import ToolCall

if TYPE_CHECKING:
    from penstock.agent_loops.chat import ChatTokens

Tools = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Proof:
    """What was checked for one model and its tools."""

    conversations: int
    rewritten: tuple[str, ...]
    """One line per kind of history that the template would write differently from what was sampled."""
    refused: tuple[str, ...] = ()
    """One line per kind of conversation that the template itself refuses, with its reason."""
    unproven: Mapping[str, str] = field(default_factory=dict)
    """Role of a message → why no reply can be continued by one: `ChatTokens.render` refuses it with this."""

    def summary(self, thinking_history: str) -> str:
        """For the log: what the template does otherwise, and what becomes of it."""
        parts = [
            f"history it rewrites (thinking_history: {thinking_history}): {', '.join(self.rewritten) or 'none'}",
            f"what it refuses: {'; '.join(self.refused) or 'nothing'}",
            *(f"after a reply no message of role {role}: {why}" for role, why in self.unproven.items()),
        ]
        return "; ".join(parts)


def prove(chat: ChatTokens, tools: Tools) -> Proof:
    """Raises `TemplateError`; `chat` may be used with `tools` where it does not."""
    if tools:
        _check_tools_are_shown(chat, tools)
        _check_tool_results_are_shown(chat, tools)
        _check_calls_are_parsed(chat, tools)
    found = _Findings()
    for case in conversations(chat.template, tools, images=chat.rendering.places is not None):
        _try(chat, tools, case, found)
    needed = "tool" if tools else "user"
    if needed not in found.proven:
        raise TemplateError(
            found.unproven.get(needed) or f"nothing can follow a reply: {'; '.join(found.refused.values())}"
        )
    if "tool" in found.unproven:
        raise TemplateError(found.unproven["tool"])
    count = found.proven.total()
    return Proof(count, tuple(dict.fromkeys(found.rewritten)), tuple(found.refused.values()), found.unproven)


@dataclass(slots=True)
class _Findings:
    proven: Counter[str] = field(default_factory=Counter)
    """By the role of what follows the reply."""
    rewritten: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    unproven: dict[str, str] = field(default_factory=dict)


def _try(chat: ChatTokens, tools: Tools, case: Case, found: _Findings) -> None:
    role = str(case.new[0]["role"])
    try:
        wanted = chat.rendering.prompt_text([*case.history, *case.new], tools)
        delta = chat.decode(chat.render(case.new, tools, case.calls))
        opening = chat.rendering.prompt_text(case.history[:-1], tools)
    except TemplateError as error:
        found.refused.setdefault(case.name, f"{case.name}: {error}")
        return
    if not wanted.endswith(delta):
        difference = _difference(opening + "".join(case.said) + delta, wanted)
        problem = f"the chat template cannot be continued on sampled ids ({case.name}): {difference}"
        found.unproven.setdefault(role, problem)
        return
    found.proven[role] += 1
    between = wanted[len(opening) : len(wanted) - len(delta)]
    if not (wanted.startswith(opening) and all(piece in between for piece in case.said)):
        found.rewritten.append(case.name)


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


def _check_calls_are_parsed(chat: ChatTokens, tools: Tools) -> None:
    name, arguments = tools[0]["function"]["name"], {"probe": "1 < 2"}
    text = chat.template.reply_with_call(tools, ToolCall(name, arguments))
    if text is None or name not in text:
        return
    found = [(call.name, call.arguments) for call in chat.parser.parse(text).calls]
    if found != [(name, arguments)]:
        raise TemplateError(f"the parser of tool calls does not read this model's calls; the template writes {text!r}")


def _difference(spliced: str, wanted: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(spliced, wanted, strict=False)) if a != b), min(len(spliced), len(wanted))
    )
    window = slice(max(0, at - 30), at + 60)
    return f"at character {at} the splice has {spliced[window]!r}, the template {wanted[window]!r}"
