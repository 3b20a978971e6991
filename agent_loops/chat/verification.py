"""Template verification: checks at start that splicing writes what the chat template writes.

On synthetic conversations, template(history + new messages) must end in the delta that would be spliced. If it also
begins with what was fed before the reply, and the reply in between is complete, the history is kept. Reported are
templates that rewrite history (Qwen3 drops old thinking after a user message) and messages that a template refuses
itself (a system prompt, several results at once).

Messages of a role that cannot be spliced (Mistral moves the system prompt behind a user's next message, Command R the
instruction to call tools) are refused by `ChatTokens.render`. `ChatTokens.go_on` begins a new segment before them,
whose prompt is the template's own, where a reply can be written again from its text: else a model with tools whose
results cannot be spliced is refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from penstock.agent_loops.chat.calls import PROBE, check_calls_are_read
from penstock.agent_loops.chat.chat import ChatTokens
from penstock.agent_loops.chat.images import take
from penstock.agent_loops.chat.template import Message, Tools, first_difference, shared_length
from penstock.agent_loops.chat.template_cases import (
    PLAIN,
    RESULT,
    USER,
    TemplateCase,
    conversations,
    results_of,
    text_of,
)
from penstock.agent_loops.errors import TemplateError
from penstock.tools.parsers import ParsedTurn, ToolCall

ASKED = "ASKED4712"
MOVED_CHARS = 20


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
    renewing: frozenset[str] = frozenset()
    """The roles among those before which `ChatTokens.go_on` begins a new segment."""

    def summary(self, thinking_history: str) -> str:
        """One line for the log."""
        parts = [
            f"history it rewrites (thinking_history: {thinking_history}): {', '.join(self.rewritten) or 'none'}",
            f"what it refuses: {'; '.join(self.refused) or 'nothing'}",
            *(f"{self._described(role)}: {why}" for role, why in self.unsupported.items()),
        ]
        return "; ".join(parts)

    def _described(self, role: str) -> str:
        new = role in self.renewing
        return f"before a message of role {role} a new segment" if new else f"after a reply no message of role {role}"


def verify_template(chat: ChatTokens, tools: Tools = ()) -> TemplateVerification:
    """Checks that splicing on `chat` writes what its template writes, with these tools; without any, with one of ours.

    Roles that cannot follow a reply in its segment are recorded in `chat.refused_roles`, and those that can begin a new
    one in `chat.renewing_roles`. Raises `TemplateError` naming the first difference.
    """
    if chat.thinking_history == "strip":
        chat.old_thinking.check_strip()
    if chat.rendering.places is not None:
        chat.rendering.places.check(chat.encode)
    verification = _verify(chat, tools)
    if not tools:
        verification = _with_tool_role(chat, verification)
    chat.refused_roles, chat.renewing_roles = verification.unsupported, verification.renewing
    return verification


def _with_tool_role(chat: ChatTokens, verification: TemplateVerification) -> TemplateVerification:
    """`verification` without tools, and what holds of results of tools that are not known at start."""
    with_one = _verified_with_probe(chat)
    if isinstance(with_one, TemplateError) or "tool" not in with_one.unsupported:
        return verification
    unsupported = {**verification.unsupported, "tool": with_one.unsupported["tool"]}
    return replace(
        verification, unsupported=unsupported, renewing=verification.renewing | (with_one.renewing & {"tool"})
    )


def _verify(chat: ChatTokens, tools: Tools) -> TemplateVerification:
    findings = _Findings()
    if tools:
        text = chat.template.render([USER], tools, prompt=True)
        missing = [tool["function"]["name"] for tool in tools if tool["function"]["name"] not in text]
        if missing:
            raise TemplateError(
                f"the model's chat template ignores tools (not shown: {', '.join(missing)}); "
                "use a model whose template has a tools section, or run without tools"
            )
        _check_results(chat, tools, findings)
        check_calls_are_read(chat.parser, chat.template, tools)
    for case in conversations(chat, tools, images=chat.rendering.places is not None):
        _try(chat, tools, case, findings)
    findings.settle()
    needed = "tool" if tools else "user"
    if needed not in findings.verified and needed not in findings.unsupported:
        raise TemplateError(f"nothing can follow a reply: {'; '.join(findings.refused.values())}")
    renewing = frozenset(role for role in findings.unsupported if _renews(chat, tools, role, findings, needed))
    count = sum(findings.anew[role] if role in renewing else findings.verified[role] for role in findings.anew)
    return TemplateVerification(
        count,
        tuple(dict.fromkeys(findings.rewritten)),
        tuple(findings.refused.values()),
        findings.unsupported,
        renewing,
    )


@dataclass(slots=True)
class _Findings:
    verified: Counter[str] = field(default_factory=Counter)
    """Verified conversations by the role of the message after the reply."""
    anew: Counter[str] = field(default_factory=Counter)
    """The same, of all conversations that the template renders."""
    rewritten: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)
    no_delta: dict[str, dict[str, str]] = field(default_factory=dict)
    """Role → name of a conversation → why its delta cannot be rendered, though the template renders it."""

    def settle(self) -> None:
        """A role for which no conversation has a delta cannot follow a reply; else those that have none are refused."""
        for role, problems in self.no_delta.items():
            if role in self.verified or role in self.unsupported:
                self.refused |= {name: f"{name}: {why}" for name, why in problems.items()}
            else:
                self.unsupported[role] = next(iter(problems.values()))


@dataclass(frozen=True, slots=True)
class _Rendered:
    """One conversation as the template writes it."""

    opening: str
    """Up to where the reply is asked for."""
    whole: str
    """With the reply and what follows it, up to the next reply."""


def _try(chat: ChatTokens, tools: Tools, case: TemplateCase, findings: _Findings) -> None:
    role = str(case.new[0]["role"])
    try:
        whole = chat.rendering.prompt_text([*case.history, *case.new], tools)
        rendered = _Rendered(chat.rendering.prompt_text(case.history[:-1], tools), whole)
    except TemplateError as error:
        findings.refused.setdefault(case.name, f"{case.name}: {error}")
        return
    findings.anew[role] += 1
    if role in findings.unsupported:
        return
    try:
        delta = chat.rendering.delta(take(case.new, {}), tools, case.calls)
    except TemplateError as error:
        findings.no_delta.setdefault(role, {}).setdefault(case.name, str(error))
        return
    _compare(chat, tools, case, rendered, delta, findings=findings)


def _compare(
    chat: ChatTokens,
    tools: Tools,
    case: TemplateCase,
    rendered: _Rendered,
    delta: Sequence[int],
    *,
    findings: _Findings,
) -> None:
    role, text = str(case.new[0]["role"]), chat.decode(delta)
    if not rendered.whole.endswith(text):
        if _moves_words(chat, tools, case, text):
            findings.verified[role] += 1
            findings.rewritten.append(f"{case.name} (it moves the words behind the results)")
        else:
            difference = _difference(rendered.opening + "".join(case.pieces) + text, rendered.whole)
            findings.unsupported[role] = (
                f"the chat template cannot be continued on sampled ids ({case.name}): {difference}"
            )
        return
    between = rendered.whole[len(rendered.opening) : len(rendered.whole) - len(text)]
    is_kept = rendered.whole.startswith(rendered.opening) and all(piece in between for piece in case.pieces)
    problem = _broken_end(chat, tools, case, rendered, delta) if is_kept else _moved(chat, tools, case, text)
    if problem:
        findings.unsupported[role] = problem
        return
    findings.verified[role] += 1
    if not is_kept:
        findings.rewritten.append(case.name)


def _broken_end(chat: ChatTokens, tools: Tools, case: TemplateCase, rendered: _Rendered, delta: Sequence[int]) -> str:
    """Return how a reply, sampled as the template writes it and up to its first stop, and the delta differ from the
    whole. Empty if they agree, and if the template ends replies differently before further messages (gpt-oss)."""
    closed = text_of(chat, tools, case.history)
    if not closed.startswith(rendered.opening) or not rendered.whole.startswith(closed.rstrip()):
        return ""
    written, stops = closed[len(rendered.opening) :], {stop: chat.decode([stop]) for stop in chat.stop_token_ids}
    ends = [(written.find(word) + len(word), stop) for stop, word in stops.items() if word in written]
    if not ends:
        return ""
    end, stop = min(ends)
    joined = rendered.opening + written[:end] + chat.decode([*chat.without_repeated_end(stop, delta)])
    if joined == rendered.whole:
        return ""
    return f"a reply does not end where the template ends it ({case.name}): {_difference(joined, rendered.whole)}"


def _moved(chat: ChatTokens, tools: Tools, case: TemplateCase, delta: str) -> str:
    """Return the text that the template moves from before a reply to after it: the model would read it twice. Empty if
    it moves none. Rendered three times, because some prompts show the time."""
    difference = ""
    for _ in range(3):
        before, after = (
            "".join(text_of(chat, tools, messages).split())
            for messages in (case.history[:-1], [*case.history, *case.new])
        )
        at = first_difference(before, after)
        taken = before[at : at + MOVED_CHARS]
        if len(taken) < MOVED_CHARS or taken not in "".join(delta.split()):
            return ""
        difference = _difference(before, after)
    return f"the chat template writes again behind a reply what stood before it ({case.name}): {difference}"


def _renews(chat: ChatTokens, tools: Tools, role: str, findings: _Findings, needed: str) -> bool:
    """Return whether a new segment can begin before messages of `role`.

    Raises `TemplateError` if it cannot and no loop can do without the role: results of tools, or, if there are
    no tools, messages of the user.
    """
    try:
        _check_written_again(chat, tools, role)
    except TemplateError as error:
        if role == "tool" or (role == needed and role not in findings.verified):
            raise TemplateError(f"{findings.unsupported[role]}; nor can a new segment begin there: {error}") from error
        return False
    return True


def _check_written_again(chat: ChatTokens, tools: Tools, role: str) -> None:
    """A rendered history shows the reply as it was sampled, and the message behind it. Raises `TemplateError`."""
    if role == "tool" and chat.template.call_form is None:
        raise TemplateError("the chat template writes no tool calls")
    calls = [ToolCall(tools[0]["function"]["name"], {"probe": ASKED}, "call00000")] if role == "tool" else []
    reply = chat.template.call_message(calls) if calls else {"role": "assistant", "content": PLAIN}
    (new,) = results_of(chat.template, calls, [RESULT]) if calls else [{"role": role, "content": RESULT}]
    whole = chat.rendering.prompt_text([USER, reply, new], tools)
    shown = whole.find(ASKED if calls else PLAIN)
    if shown < 0 or RESULT not in whole[shown:]:
        raise TemplateError(f"the chat template does not show a reply and a message of role {role} behind it")
    text = _up_to_stop(chat, _reply_in(chat, tools, reply, whole))
    parsed = chat.parser.parse(text, tools) if calls else ParsedTurn(text)
    if [call.name for call in parsed.calls] != [call.name for call in calls]:
        raise TemplateError("a token that ends a reply stands inside a reply that calls")
    content = re.sub(r"</?think>", "", chat.continuation.special.sub("", parsed.content)).strip()
    if content != ("" if calls else PLAIN):
        raise TemplateError(f"a reply cannot be written again from its text: {content[:80]!r} would be its content")


def _reply_in(chat: ChatTokens, tools: Tools, reply: Message, whole: str) -> str:
    """The reply as `whole` shows it, which has a message behind it: all behind the opening of a reply.

    Raises `TemplateError` if that opening cannot be found.
    """
    unasked, opening = (chat.template.render([USER], tools, prompt=prompt) for prompt in (False, True))
    closed, other = (text_of(chat, tools, [USER, one]) for one in (reply, {"role": "assistant", "content": "0"}))
    at = shared_length(closed, other)
    prompt_opening = opening.removeprefix(unasked)
    if not opening.startswith(unasked) or prompt_opening not in closed[:at]:
        raise TemplateError("the chat template opens a reply that it writes otherwise than one that it asks for")
    end = shared_length(closed, whole)
    return closed[closed.rindex(prompt_opening, 0, at) + len(prompt_opening) : end if end > at else len(closed)]


def _up_to_stop(chat: ChatTokens, text: str) -> str:
    words = [chat.decode([stop]) for stop in chat.stop_token_ids]
    return text[: min((text.find(word) for word in words if word in text), default=len(text))]


def _moves_words(chat: ChatTokens, tools: Tools, case: TemplateCase, delta: str) -> bool:
    """The template writes what a reply says next to its calls behind their results (Gemma 4), so that only the delta of
    the calls alone can be compared. Sampled words are not moved, as all history that a template rewrites."""
    if not case.calls or not case.pieces or chat.template.call_form is None:
        return False
    bare = [{**message, "content": ""} if message.get("tool_calls") else message for message in case.history]
    try:
        return chat.rendering.prompt_text([*bare, *case.new], tools).endswith(delta)
    except TemplateError:
        return False


@lru_cache(maxsize=4)
def _verified_with_probe(chat: ChatTokens) -> TemplateVerification | TemplateError:
    try:
        return _verify(chat, [PROBE])
    except TemplateError as error:
        return error


def tools_problem(chat: ChatTokens) -> str:
    """The reason why this model cannot be given tools; empty if it can. For tools that are not known at start."""
    verification = _verified_with_probe(chat)
    return str(verification) if isinstance(verification, TemplateError) else ""


def _check_results(chat: ChatTokens, tools: Tools, findings: _Findings) -> None:
    """Records in `findings` where results cannot be spliced. Raises `TemplateError` where the template ignores them."""
    result, call = {"role": "tool", "content": RESULT}, ToolCall(tools[0]["function"]["name"])
    try:
        delta = chat.continuation.delta([result], [call])
        again = chat.continuation.delta([result], [call], tools)
    except TemplateError as error:
        if chat.template.call_form is None:
            raise
        findings.unsupported["tool"] = str(error)
        return
    if RESULT not in delta:
        raise TemplateError("the model's chat template ignores messages of role tool: the model would read no results")
    if again != delta:
        findings.unsupported["tool"] = (
            "the chat template shows tools again after a call; such results cannot be spliced"
        )


def _difference(spliced: str, expected: str) -> str:
    at = first_difference(spliced, expected)
    window = slice(max(0, at - 30), at + 60)
    return f"at character {at} the splice has {spliced[window]!r}, the template {expected[window]!r}"
