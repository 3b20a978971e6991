"""`ChatTokens`: messages are tokenized once; later turns are spliced onto verbatim ids (invariant 1)."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.agent_loops.chat.calls import NoParser, choose_parser
from penstock.agent_loops.chat.continuation import NUMBER
from penstock.agent_loops.chat.images import NAMED, parts_of, take, with_images
from penstock.agent_loops.chat.model_files import generation_stops, load_processor, load_tokenizer
from penstock.agent_loops.chat.rendering import Rendering, key_of
from penstock.agent_loops.chat.template import ChatTemplate, Message, Tools, dated
from penstock.agent_loops.chat.thinking import OldThinking, ThinkingHistory, thinks, written_again
from penstock.agent_loops.config import AgentConfig
from penstock.agent_loops.errors import AgentError, TemplateError
from penstock.agent_loops.segment import Budget, MessageDelta, SegmentBuilder
from penstock.rollout_server import Generation, ImageRef
from penstock.tools import ToolResult
from penstock.tools.parsers import ParsedTurn, ToolCall, ToolCallParser


class ChatTokens:
    """The `chat` of a loop. One per worker holds the caches; `for_episode` gives each episode its own budget."""

    def __init__(
        self,
        tokenizer: Any,
        parser: ToolCallParser,
        budget: Budget | None = None,
        *,
        template_settings: Mapping[str, Any] | None = None,
        thinking_history: ThinkingHistory = "keep",
        stop_ids: Sequence[int] = (),
        processor: Any = None,
    ) -> None:
        """`stop_ids`: of `generation_stops`; `processor`: of `load_processor`, None for text alone."""
        self.tokenizer = tokenizer
        self.rendering = Rendering(tokenizer, template_settings, stop_ids, processor)
        self.encode, self.decode = self.rendering.encode, self.rendering.decode
        self.template, self.continuation = self.rendering.template, self.rendering.continuation
        self.ends, self.opening_tokens = self.rendering.ends, self.rendering.opening_tokens
        self.defused = self.rendering.defused
        self.turn_end_id = self.ends.stops[0]
        self.parser = parser
        self.thinking_history = thinking_history
        self.old_thinking = OldThinking(self.template)
        self.refused_roles: Mapping[str, str] = {}
        """Role → why `render` refuses its messages; set by `verify_template`."""
        self.renewing_roles: Collection[str] = ()
        """The refused roles before which `go_on` begins a new segment; set by `verify_template`."""
        self._begin_episode(budget or new_budget(AgentConfig()))

    def for_episode(self, budget: Budget) -> ChatTokens:
        """The same template and caches; segments made from it draw on `budget`."""
        chat = copy.copy(self)
        chat._begin_episode(budget)
        return chat

    def _begin_episode(self, budget: Budget) -> None:
        self.budget = budget
        self._tools: dict[str, Mapping[str, Any]] = {}
        """Schemas that this episode's prompts showed, by name; they have the types of arguments written as text."""
        self._read: tuple[Generation | None, ParsedTurn] = (None, ParsedTurn(""))
        """The last parsed reply."""
        self._images: dict[str, ImageRef] = {}
        """Images of this episode, by content."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a reply: the template's ends of turn, the tokenizer's end of text, the model's own."""
        return self.ends.stops

    def count_tokens(self, text: str) -> int:
        """Number of tokens of plain text, such as a tool result before it is rendered."""
        return len(self.encode(text))

    # what a loop calls ---------------------------------------------------------------------------------------------
    def start(self, messages: Sequence[Message], tools: Tools = ()) -> SegmentBuilder:
        """A new segment: the prompt by the chat template, up to the model's answer. Raises `TemplateError`."""
        self._tools.update({tool["function"]["name"]: tool for tool in tools if "function" in tool})
        if tools and isinstance(self.parser, NoParser):
            raise TemplateError(self.parser.problem)
        messages = take(messages, self._images)
        return self._begin(self.rendering.prompt(key_of(messages, tools)), messages, tools)

    def go_on(self, segment: SegmentBuilder, reply: Generation, messages: Sequence[Message]) -> SegmentBuilder:
        """The segment in which the model reads `messages` after its `reply`; for loops of several turns.

        Usually the same segment with the delta observed. A new segment, which begins with the history as rendered,
        where the template writes the messages in a way that cannot be appended (`renewing_roles`), and under
        ``thinking_history: strip`` if it drops thinking: return the outputs of all (`Conversation` does). Without
        room for an answer it is the same segment, done. Raises `TemplateError`.
        """
        calls, messages = self.tool_calls(reply), take(messages, self._images)
        if not self._remembers:
            segment.observe(self.render(messages, segment.tools, calls))
            return segment
        if segment.messages_up_to != segment.context_len - len(reply.token_ids):
            raise AgentError("go_on() needs every message of the conversation: use it, not observe(), in each turn")
        new = self._recorded_messages(segment, reply, calls, messages)
        renews = any(message.get("role") in self.renewing_roles for message in messages)
        if renews or (self._drops(messages) and thinks(self.decode(segment.take_unsearched()))):
            history = [*segment.messages, *new]
            prompt = self.rendering.prompt_anew(key_of(history, segment.tools))
            if segment.make_room(self._cost(messages, segment.tools, calls, renews=renews), len(prompt)):
                return self._begin(prompt, history, segment.tools)
        if not renews:
            segment.observe(self.render(messages, segment.tools, calls))
        segment.remember(new)
        return segment

    def begins_anew(self, context: Sequence[int], messages: Sequence[Message]) -> bool:
        """``thinking_history: strip`` asks for a new segment: before `messages` thinking in `context` is dropped."""
        return self._drops(messages) and thinks(self.decode(context))

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        """Ids of a conversation up to the model's answer. Raises `TemplateError`."""
        return tuple(self.rendering.prompt(key_of(messages, tools)))

    def tool_calls(self, reply: Generation) -> list[ToolCall]:
        """Calls in a reply, including malformed ones with their error. Empty for a reply cut by length."""
        return list(self._parsed(reply).calls)

    def render_tools(self, results: Sequence[ToolResult], calls: Sequence[ToolCall] | None = None) -> MessageDelta:
        """The delta for tool results, in the order of their calls; for `segment.observe`.

        Some templates write the name or id of the call next to a result. `calls` None: those that `tool_calls` found
        last; sub-agents that share an episode and run at the same time must give their own.
        """
        answered = self._read[1].calls if calls is None else tuple(calls)
        return self.render(tool_messages(results), calls=answered if len(answered) == len(results) else ())

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        calls: Sequence[ToolCall] = (),
    ) -> MessageDelta:
        """The delta for further messages: end of the reply, the messages, opening of the next reply.

        Begins with an end-of-turn id, which `segment.observe` leaves out where the model sampled it. Special tokens
        spelled out in the messages are defused: what a tool prints cannot open or close a turn. `tools` matter to
        templates that show them before the last user message (Mistral), `calls` as in `render_tools`.
        Raises `TemplateError`, also where `go_on` would begin a new segment.
        """
        refused = [str(message["role"]) for message in messages if message.get("role") in self.refused_roles]
        if refused:
            role, fix = refused[0], "take the next segment from go_on(), or from a Conversation"
            raise TemplateError(self.refused_roles[role] + (f"; {fix}" if role in self.renewing_roles else ""))
        messages = take(messages, self._images)
        return MessageDelta(self.rendering.delta(messages, tools, calls), self._images_of(messages))

    def without_repeated_end(self, last: int, delta: Sequence[int]) -> Sequence[int]:
        """`delta` after the id `last`: an end token that the model sampled is not repeated."""
        repeated = self.ends.repeated(last, delta)
        return delta[repeated or int(bool(delta) and delta[0] == last) :]

    # helpers -------------------------------------------------------------------------------------------------------
    def _begin(self, ids: Sequence[int], messages: Sequence[Message], tools: Tools) -> SegmentBuilder:
        images, placeholders = self._images_of(messages), self.rendering.placeholders
        segment = SegmentBuilder(ids, self.budget, self.ends.stops, self.ends, images=images, placeholders=placeholders)
        segment.tools = tuple(tools)
        if self._remembers:
            segment.remember(messages)
        return segment

    @property
    def _remembers(self) -> bool:
        """Histories may have to be written again."""
        return self.thinking_history == "strip" or bool(self.renewing_roles)

    def _images_of(self, messages: Sequence[Message]) -> list[ImageRef]:
        return [self._images[part["image"].removeprefix(NAMED)] for part in parts_of(messages)]

    def _parsed(self, reply: Generation) -> ParsedTurn:
        """A reply cut by length is text without calls."""
        if self._read[0] is not reply:
            cut = reply.finish_reason == "length"
            parsed = ParsedTurn(reply.text) if cut else self.parser.parse(reply.text, tuple(self._tools.values()))
            self._read = (reply, parsed)
        return self._read[1]

    def _drops(self, messages: Sequence[Message]) -> bool:
        """``thinking_history: strip``, and the template drops thinking before `messages`."""
        return self.thinking_history == "strip" and self.old_thinking.is_dropped_before(messages)

    def _recorded_messages(
        self, segment: SegmentBuilder, reply: Generation, calls: Sequence[ToolCall], messages: Sequence[Message]
    ) -> list[Message]:
        """The reply and what follows it, for a history. Each call has an id that no other of the conversation has, the
        model's own if possible: a template may look up by it which call a result answers."""
        first = sum(
            len(message.get("tool_calls") or ()) + (message.get("role") == "tool") for message in segment.messages
        )
        named = self.template.call_form is not None and self.template.call_form.ids == "named"
        taken = Counter(str(call.get("id")) for message in segment.messages for call in message.get("tool_calls") or ())
        taken.update(call.written_id for call in calls)
        # A number counts the calls before it, and the template counts them itself.
        own = [named or (not NUMBER.fullmatch(call.written_id) and taken[call.written_id] == 1) for call in calls]
        numbered = [
            replace(call, call_id=f"call{first + at:05d}", written_id=call.written_id if own[at] else "")
            for at, call in enumerate(calls)
        ]
        parsed = replace(self._parsed(reply), calls=tuple(numbered))
        message = written_again(self.template, parsed, reply.text, self.continuation.special)
        return [message, *self.rendering.with_ids(messages, numbered)]

    def _cost(
        self,
        messages: Sequence[Message],
        tools: Tools,
        calls: Sequence[ToolCall],
        *,
        renews: bool,
    ) -> int:
        """Ids that `messages` draw on the budget: those of their delta, or of their text if they have none."""
        if renews:
            return sum(self.count_tokens(json.dumps(message["content"], ensure_ascii=False)) for message in messages)
        return len(self.rendering.delta(messages, tools, calls))


def chat_of(model: str, config: AgentConfig) -> ChatTokens:
    """Return the chat tokens of a model folder or hub name under a run's settings. Raises `TemplateError`, `ValueError`
    for the parser.
    """
    tokenizer = load_tokenizer(model)
    if config.date is not None:
        tokenizer.chat_template = dated(tokenizer.chat_template, config.date)
    return ChatTokens(
        tokenizer,
        choose_parser(config.parser, ChatTemplate(tokenizer, config.template_settings)),
        template_settings=config.template_settings,
        thinking_history=config.thinking_history,
        stop_ids=generation_stops(model),
        processor=load_processor(model, tokenizer),
    )


def tool_messages(results: Sequence[ToolResult]) -> list[Message]:
    """Results as messages, for `ChatTokens.go_on`."""
    return [{"role": "tool", "content": with_images(result.text, result.images)} for result in results]


def new_budget(config: AgentConfig, window: int = 0) -> Budget:
    """A fresh episode's budget."""
    return Budget(config.max_turns, config.max_response_tokens, window)
