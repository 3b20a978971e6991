"""A model's chat template as text: how a conversation reads, in the forms in which its author wants tool calls."""

from __future__ import annotations

import itertools
import json
import logging
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal, get_args

import xxhash
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.exceptions import TemplateSyntaxError, UndefinedError

from penstock.agent_loops.errors import TemplateError
from penstock.tools.parsers import ToolCall

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
"""Definitions of tools, in OpenAI's form."""
MARK = "REPLYMARKERQX"
SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


log = logging.getLogger(__name__)
CallIds = Literal["any", "short", "named"]


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a template takes the tool calls of a message."""

    arguments_as_text: bool
    """Arguments are JSON text (DeepSeek), not an object."""
    ids: CallIds
    """Form of call ids. short: nine letters or digits (Mistral); named: ``functions.NAME:NUMBER``, the only place of
    the name in a call (Kimi K2)."""


CALL_FORMS = tuple(CallForm(as_text, ids) for as_text, ids in itertools.product((False, True), get_args(CallIds)))


def dated(template: Any, day: date) -> Any:
    """Return a tokenizer's template, or its templates by name, in which today is `day`; warns where it is not."""
    if isinstance(template, Mapping):
        return {name: dated(one, day) for name, one in template.items()}
    # transformers hands no function to a template, so the calls are replaced by what they return.
    call_of_today = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")
    text = call_of_today.sub(lambda call: json.dumps(day.strftime(call[2])), template or "")
    for call in re.finditer(r"strftime_now\s*\(.*?\)", text):
        log.warning(
            "the chat template writes the day of each process with %s, not the run's %s: write the format there as a"
            " text in quotes",
            *(call[0], day),
        )
    return text if template else template


class ChatTemplate:
    """Renders messages to text with the tokenizer's own template. `settings` reach the template as variables."""

    def __init__(self, tokenizer: Any, settings: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._settings = dict(settings or {})
        self._no_tools: list[Any] | None = None
        self._forced_opening = ""
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateError(
                f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template; put one into its "
                "folder as chat_template.jinja, or use an instruction-tuned model"
            )
        self.source = str(tokenizer.get_chat_template())
        """The template's own text."""
        self._no_tools = self._find_no_tools()
        self._forced_opening = self._find_forced_opening()
        self.call_form = self._find_call_form()
        """None: the template writes no tool calls; they are part of a reply's text."""

    def render(self, messages: Sequence[Message], tools: Tools = (), *, prompt: bool) -> str:
        """The conversation as text; `prompt` adds the opening of the next reply. Raises `TemplateError`."""
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or self._no_tools,
                tokenize=False,
                add_generation_prompt=prompt,
                **self._settings,
            )
        except TemplateSyntaxError as error:
            raise TemplateError(f"the chat template has a mistake in line {error.lineno}: {error.message}") from error
        except UndefinedError as error:
            owner = self._tokenizer.name_or_path or "this model"
            raise TemplateError(
                f"the chat template of {owner} asks in line {_line_of(error)} for what its messages do not have: "
                f"{error.message}; write a test (`is defined`) around it"
            ) from error
        except (JinjaError, TypeError, KeyError, AttributeError, ValueError) as error:
            roles = [message.get("role") for message in messages]
            raise TemplateError(f"the chat template refuses messages with roles {roles}: {error}") from error
        return text if prompt else text.removesuffix(self._forced_opening)

    def call_message(self, calls: Sequence[ToolCall], content: str = "", form: CallForm | None = None) -> Message:
        """A reply that makes `calls`, as this template takes it."""
        form = form or self.call_form or CALL_FORMS[0]
        tool_calls = []
        for index, call in enumerate(calls):
            arguments: Any = dict(call.arguments)
            if form.arguments_as_text:
                arguments = json.dumps(arguments, ensure_ascii=False)
            function = {"name": call.name or "tool", "arguments": arguments}
            call_id = self.call_id(call.written_id or call.call_id, index, call.name, form)
            tool_calls.append({"id": call_id, "type": "function", "function": function})
        return {"role": "assistant", "content": content, "tool_calls": tool_calls}

    def call_id(self, call_id: str, index: int, name: str, form: CallForm | None = None) -> str:
        """`call_id` where the template takes it, else one by position, and for the tool `name` where ids have names."""
        form = form or self.call_form or CALL_FORMS[0]
        if form.ids == "short" and not SHORT_ID.fullmatch(call_id):
            return f"call{index:05d}"
        if form.ids == "named" and not re.fullmatch(r"functions\.[^\s:]+:\d+", call_id):
            return f"functions.{name or 'tool'}:{index}"
        return call_id or f"call_{index}"

    def fitted(self, messages: Sequence[Message]) -> list[Message]:
        """Messages of a client whose calls are in OpenAI's form, in the form that this template takes."""
        if self.call_form is None:
            return list(messages)
        form, ids = self.call_form, self._fitted_ids(messages)
        fitted = []
        for message in messages:
            changed: dict[str, Any] = {}
            if answered := str(message.get("tool_call_id") or ""):
                changed["tool_call_id"] = ids.get(answered) or self._fitted_id(answered)
            if message.get("tool_calls"):
                changed["tool_calls"] = []
                for call in message["tool_calls"]:
                    function = dict(call.get("function") or {})
                    if form.arguments_as_text and isinstance(function.get("arguments"), Mapping):
                        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
                    changed["tool_calls"].append({**call, "id": ids[str(call.get("id") or "")], "function": function})
            fitted.append({**message, **changed} if changed else message)
        return fitted

    def _fitted_ids(self, messages: Sequence[Message]) -> dict[str, str]:
        """Id of a client → id that the template takes. Ids with names count the calls of the conversation."""
        calls = [call for message in messages for call in message.get("tool_calls") or ()]
        ids = [str(call.get("id") or "") for call in calls]
        if self.call_form is None or self.call_form.ids != "named":
            return {call_id: self._fitted_id(call_id) for call_id in ids}
        names = [str((call.get("function") or {}).get("name") or "") for call in calls]
        return {one: self.call_id(one, at, name) for at, (one, name) in enumerate(zip(ids, names, strict=True))}

    def _fitted_id(self, call_id: str) -> str:
        """A call and its result keep the same id, also where the template takes nine characters only."""
        takes_it = not (self.call_form and self.call_form.ids == "short") or SHORT_ID.fullmatch(call_id)
        return call_id if takes_it else xxhash.xxh3_64_hexdigest(call_id.encode())[:9]

    def reply_with_call(self, tools: Tools, call: ToolCall) -> str | None:
        """Return a reply of one tool call as the template writes it, its end included; None if it writes none.

        Without the opening of a reply, as far as both agree: a prompt may open a thought that old turns show closed.
        """
        if self.call_form is None:
            return None
        user = {"role": "user", "content": "x"}
        opening = self.render([user], tools, prompt=True)
        closed = self.render([user, self.call_message([call])], tools, prompt=False)
        return closed[shared_length(opening, closed) :]

    def _find_no_tools(self) -> list[Any] | None:
        """Returns the value for no tools: None, or an empty list for templates that always read one (Hermes 3)."""
        user = {"role": "user", "content": "x"}
        for self._no_tools in (None, []):
            try:
                self.render([user], prompt=True)
            except TemplateError:
                continue
            return self._no_tools
        return None

    def _find_forced_opening(self) -> str:
        """The opening of the next reply where the template writes it whether it is asked to or not; else empty.

        It stands behind the token that ends a reply: the tokenizer's end of text, else the first special one.
        """
        user = {"role": "user", "content": "x"}
        messages = [user, {"role": "assistant", "content": MARK}]
        try:
            unasked, prompted = (self.render(messages, prompt=prompt) for prompt in (False, True))
            opened = self.render([user], prompt=False)
        except TemplateError:
            return ""
        tail = unasked.rpartition(MARK)[2] if unasked == prompted else ""
        eos, added = self._tokenizer.eos_token, self._tokenizer.added_tokens_decoder.values()
        words = [eos] if eos and eos in tail else [token.content for token in added if token.special]
        ends = [tail.find(word) + len(word) for word in words if word in tail]
        opening = tail[min(ends) :] if ends else ""
        return opening if opening.strip() and opened.endswith(opening) else ""

    def _find_call_form(self) -> CallForm | None:
        """The first form that the template takes without an objection and writes down, if possible not as Python does:
        templates that print arguments as they are want JSON text (Phi-4-mini). Some write calls only where tools are
        shown (Hunyuan A13B)."""
        arguments = {"probe": MARK}
        call = ToolCall("tool_name_marker_qx", arguments)
        function = {"name": "some_tool", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
        tool = {"type": "function", "function": function}
        written = self._forms_written(call, ()) or self._forms_written(call, [tool])
        as_json = [form for form, text in written if repr(arguments) not in text]
        return next(iter([*as_json, *(form for form, _ in written)]), None)

    def _forms_written(self, call: ToolCall, tools: Tools) -> list[tuple[CallForm, str]]:
        written = []
        for form in CALL_FORMS:
            messages = [{"role": "user", "content": "x"}, self.call_message([call], form=form)]
            try:
                text = self.render(messages, tools, prompt=False)
            except TemplateError:
                continue
            if MARK in text and call.name in text:
                written.append((form, text))
        return written


def _line_of(error: UndefinedError) -> int:
    """Line of the template in which it arose; 0 if it arose elsewhere."""
    frames = traceback.extract_tb(error.__traceback__)  # jinja puts the lines of templates made of text into it
    return next((frame.lineno or 0 for frame in reversed(frames) if frame.filename == "<template>"), 0)


def first_difference(one: str, other: str) -> int:
    """The index at which they differ; the shorter one's length if it begins the other."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def shared_length(opening: str, closed: str) -> int:
    """Length of the common beginning. It cuts no tag in two: `<think>` and `<tool_call>` begin alike."""
    shared = first_difference(opening, closed)
    if shared == len(opening):
        return shared
    tag = max(closed.rfind("<", 0, shared), closed.rfind("[", 0, shared))
    return tag if tag > max(closed.rfind(">", 0, shared), closed.rfind("]", 0, shared)) else shared
