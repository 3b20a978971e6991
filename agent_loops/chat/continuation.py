"""Derives from a chat template what it writes after a reply.

A synthetic conversation that ends in a marked reply is rendered closed, and extended by the new messages:

    user, assistant MARK          ──template──► …<|im_start|>assistant\\nMARK│<|im_end|>\\n
    user, assistant MARK, tool …  ──template──► …<|im_start|>assistant\\nMARK│<|im_end|>\\n<|im_start|>user\\n…
                                                                            └── delta ───────────────────►

Before tool results the reply is a tool call with the mark in its arguments: some templates take results only after the
call that they answer, or write its name or id next to them. There the delta is the call's closing token and what the
extended text has beyond the closed one. Nothing between two turns can get lost, such as Qwen's newline. Where the model
numbers the calls of a conversation (Cohere), as many calls stand before the marked one as its number says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from penstock.agent_loops.chat.template import MARK, ChatTemplate, Message, Tools
from penstock.agent_loops.errors import TemplateError
from penstock.tools.parsers import ToolCall

NUMBER = re.compile(r"[0-9]{1,3}")
ASKS: Message = {"role": "user", "content": "x"}


class Continuation:
    """`special` matches the text of any special token."""

    def __init__(self, template: ChatTemplate, special: re.Pattern[str]) -> None:
        self.template = template
        self.special = special
        self._closed_by: dict[tuple[str, str], str] = {}
        """(repr of the marked call, repr of the tools) → see `_closed`"""
        self._last_token = re.compile(rf"(?:{special.pattern})\s*\Z")

    def delta(self, messages: Sequence[Message], calls: Sequence[ToolCall] = (), tools: Tools = ()) -> str:
        """End of the reply, `messages`, opening of the next reply. `calls` are those that leading results answer.

        Raises `TemplateError` where the template refuses the messages or drops the reply before them.
        """
        answered = self._answered(messages, calls)
        messages = self._named(messages, answered)
        refusal: TemplateError | None = None
        if answered and self.template.call_form is not None:
            try:
                return self._after_calls(answered, messages, tools)
            except TemplateError as error:
                refusal = error
        try:
            mark = unused_mark(messages, repr(tools))
            reply = {"role": "assistant", "content": mark}
            return _behind(mark, self.template.render([ASKS, reply, *messages], tools, prompt=True))
        except TemplateError as error:
            raise refusal or error from error

    def with_calls(self, messages: Sequence[Message], calls: Sequence[ToolCall]) -> list[Message]:
        """Leading tool messages with the name and the id of the call that each answers."""
        return self._named(messages, self._answered(messages, calls))

    def closings(self) -> list[str]:
        """Return the ends of a reply that nothing follows: of text, and of a tool call if the template writes calls."""
        closings = [_behind(MARK, self.template.render([ASKS, {"role": "assistant", "content": MARK}], prompt=False))]
        if self.template.call_form is not None:
            call = self.template.call_message([_marked(ToolCall("probe"), MARK)])
            closings.append(self.closing_of(self.template.render([ASKS, call], prompt=False)))
        return closings

    def turn(self) -> str:
        """A user's turn behind a reply, without the opening of the next one; empty where the template takes none."""
        try:
            messages = [ASKS, {"role": "assistant", "content": MARK}, ASKS]
            return _behind(MARK, self.template.render(messages, prompt=False))
        except TemplateError:
            return ""

    def opening_tokens(self, encode: Callable[[str], list[int]]) -> int:
        """Ids that a prompt has beyond the messages: the opening of a reply."""
        closed, opened = (encode(self.template.render([ASKS], prompt=prompt)) for prompt in (False, True))
        return len(opened) - len(closed) if opened[: len(closed)] == closed else 0

    def closing_of(self, closed: str) -> str:
        """The special token that ends `closed`, and white space after it; empty where none does."""
        match = self._last_token.search(closed)
        return match[0] if match else ""

    # helpers -------------------------------------------------------------------------------------------------------
    def _named(self, messages: Sequence[Message], answered: Sequence[ToolCall]) -> list[Message]:
        named: list[Message] = []
        for index, (message, call) in enumerate(zip(messages, answered, strict=False)):
            written_id = call.written_id or str(message.get("tool_call_id") or call.call_id)
            call_id = self.template.call_id(written_id, index, call.name)
            named.append({"name": call.name or "tool", **message, "tool_call_id": call_id})
        return [*named, *messages[len(answered) :]]

    def _answered(self, messages: Sequence[Message], calls: Sequence[ToolCall]) -> list[ToolCall]:
        """The call that each leading tool message answers: by id, by position, or one made up."""
        by_id = {call.call_id: call for call in calls if call.call_id}
        answered = []
        for index, message in enumerate(messages):
            if message.get("role") != "tool":
                break
            call = by_id.get(str(message.get("tool_call_id") or "")) or (calls[index] if index < len(calls) else None)
            if call is None:
                call = ToolCall(str(message.get("name") or "tool"), call_id=str(message.get("tool_call_id") or ""))
            answered.append(call)
        return answered

    def _after_calls(self, calls: Sequence[ToolCall], messages: Sequence[Message], tools: Tools) -> str:
        tools_text = repr(tools)
        mark = unused_mark(messages, tools_text)
        replies = [*self._earlier(calls[0]), self.template.call_message([*calls[:-1], _marked(calls[-1], mark)])]
        closed = self._closed(replies, mark, tools, tools_text)
        extended = _behind(mark, self.template.render([ASKS, *replies, *messages], tools, prompt=True))
        if not extended.startswith(closed):
            raise TemplateError(
                f"the chat template closes a call with {closed!r}, but writes {extended!r} before results"
            )
        return self.closing_of(closed) + extended[len(closed) :]

    def _earlier(self, call: ToolCall) -> list[Message]:
        """A reply with as many calls as the number of `call` counts before it; none if it has no number."""
        if not NUMBER.fullmatch(call.written_id) or not int(call.written_id):
            return []
        made_up = [ToolCall(call.name, call_id=f"earlier{at}") for at in range(int(call.written_id))]
        return [self.template.call_message(made_up)]

    def _closed(self, replies: Sequence[Message], mark: str, tools: Tools, tools_text: str) -> str:
        """Returns the end of a conversation behind the marked call; cached, since most turns of a run share it.
        `tools_text`: repr of the tools."""
        key = (repr(replies), tools_text)
        if key not in self._closed_by:
            if len(self._closed_by) >= 64:
                self._closed_by.clear()
            self._closed_by[key] = _behind(mark, self.template.render([ASKS, *replies], tools, prompt=False))
        return self._closed_by[key]


def unused_mark(messages: Sequence[Message], tools_text: str) -> str:
    """Returns a word that is neither in the messages nor in `tools_text`, the repr of the tools.

    A tool that prints our mark must not be able to move the cut.
    """
    mark, text = MARK, repr(messages)
    while mark in text or mark in tools_text:
        mark += "Q"
    return mark


def _marked(call: ToolCall, mark: str) -> ToolCall:
    """The arguments of a call leave no trace in what follows it; only its name and id may."""
    return ToolCall(call.name, {"probe": mark}, call.call_id, call.written_id)


def _behind(mark: str, text: str) -> str:
    _, mark_found, rest = text.rpartition(mark)
    if not mark_found:
        raise TemplateError("the chat template drops or changes the content of assistant messages")
    return rest
