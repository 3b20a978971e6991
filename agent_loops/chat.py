"""Messages become ids once; later turns are spliced onto verbatim ids (invariant 1)."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from penstock.agent_loops.added_tokens import AddedTokens, any_of, defused
from penstock.agent_loops.config import AgentConfig
from penstock.agent_loops.continuation import Continuation
from penstock.agent_loops.ends import find_ends
from penstock.agent_loops.errors import AgentError, TemplateError
from penstock.agent_loops.segment import Budget, SegmentBuilder
from penstock.agent_loops.template import ChatTemplate, Message
from penstock.agent_loops.thinking import THOUGHT, OldThinking, ThinkingHistory
from penstock.tools.base import ToolResult
from penstock.tools.parsers import ToolCall, ToolCallParser, get_parser

if TYPE_CHECKING:
    from penstock.agent_loops.llm import Reply
    from penstock.agent_loops.proof import Proof

CACHED_PROMPTS = 512


def load_tokenizer(model: str) -> Any:
    """The model's fast tokenizer. Imports transformers; raises `TemplateError` naming the folder where it is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise TemplateError(f"no tokenizer in {model!r}: {error}") from error


class ChatTokens:
    """The `chat` of a loop. One per worker holds the caches; `for_episode` gives each episode its own budget."""

    def __init__(
        self,
        tokenizer: Any,
        parser: ToolCallParser,
        budget: Budget | None = None,
        template_settings: Mapping[str, Any] | None = None,
        thinking_history: ThinkingHistory = "keep",
    ) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, template_settings)
        self.parser = parser
        self.budget = budget or new_budget(AgentConfig())
        self.thinking_history = thinking_history
        self.old_thinking = OldThinking(self.template)
        words = AddedTokens(tokenizer)
        self.continuation = Continuation(self.template, any_of(words.special))
        self.ends = find_ends(self.continuation, self.encode, words.special_ids)
        self._turn_words = any_of([*words.special, *words.shown_in(self.continuation.turn())])
        self.turn_end_id = self.ends.stops[0]
        self._tools: dict[str, Mapping[str, Any]] = {}
        """Schemas that this episode's prompts showed, by name; they have the types of arguments written as text."""
        self._first_ids = lru_cache(CACHED_PROMPTS)(self._encode_first)
        self._last_calls: tuple[ToolCall, ...] = ()
        self._unproven: Mapping[str, str] = {}

    def count_tokens(self, text: str) -> int:
        """Tokens of a text that is no message: of a tool's result before it is rendered."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def for_episode(self, budget: Budget) -> ChatTokens:
        """The same template and caches; segments made from it draw on `budget`."""
        chat = copy.copy(self)
        chat.budget = budget
        chat._last_calls = ()
        chat._tools = {}
        return chat

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a reply: the template's ends of turn, and the tokenizer's end of text."""
        eos = self.tokenizer.eos_token_id
        return self.ends.stops if eos is None or eos in self.ends.stops else (*self.ends.stops, eos)

    # what a loop calls ---------------------------------------------------------------------------------------------
    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> SegmentBuilder:
        """The first turn, by the chat template, up to where the model is to answer. Raises `TemplateError`."""
        self._tools.update({tool["function"]["name"]: tool for tool in tools if "function" in tool})
        segment = SegmentBuilder(self.prompt_ids(messages, tools), self.budget, self.stop_token_ids, self.ends)
        segment.tools = tuple(tools)
        segment.remember(messages)
        return segment

    def go_on(self, segment: SegmentBuilder, reply: Reply, messages: Sequence[Message]) -> SegmentBuilder:
        """The segment in which the model reads `messages` after its `reply`; for loops with several user turns.

        The same one with the delta observed, or, under ``thinking_history: strip`` where the template drops the
        thinking that it holds, a new one that begins with the history as the template writes it: hand back the outputs
        of all. Where no room is left to answer it is the same one, done. Raises `TemplateError`.
        """
        calls, said = self.tool_calls(reply), segment.said
        if self.thinking_history == "strip":
            if segment.said_up_to != segment.context_len - len(reply.ids):
                raise AgentError("go_on() needs every message of the conversation: use it, not observe(), in each turn")
            said = (*said, self._as_message(reply), *self._with_ids(messages, calls))
            if not segment.done and self.begins_anew(segment.context(), messages):
                return self.start(said, segment.tools)
        segment.observe(self.render(messages, segment.tools, calls))
        segment.remember(said)
        return segment

    def begins_anew(self, context: Sequence[int], messages: Sequence[Message]) -> bool:
        """``thinking_history: strip`` asks for a new segment: before `messages` thinking in `context` is dropped."""
        if self.thinking_history == "keep" or not self.old_thinking.is_dropped_before(messages):
            return False
        return THOUGHT.search(self.decode(context)) is not None

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """Ids of a conversation up to where the model is to answer. Raises `TemplateError`."""
        return self._first_ids(json.dumps([list(messages), list(tools)], ensure_ascii=False))

    def tool_calls(self, reply: Reply) -> list[ToolCall]:
        """Calls in a reply, malformed ones included (they carry their error). None from a reply cut by length."""
        cut = reply.finish_reason == "length"
        calls = [] if cut else list(self.parser.parse(reply.text, tuple(self._tools.values())).calls)
        self._last_calls = tuple(calls)
        return calls

    def render_tools(self, results: Sequence[ToolResult], calls: Sequence[ToolCall] | None = None) -> list[int]:
        """The delta for tool results, in the order of their calls; for `segment.observe`.

        Some templates write the name or id of the call beside a result. `calls` None: those that `tool_calls` found
        last; sub-agents that share an episode and run at the same time must give their own.
        """
        answered = self._last_calls if calls is None else tuple(calls)
        return self.render(tool_messages(results), calls=answered if len(answered) == len(results) else ())

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        calls: Sequence[ToolCall] = (),
    ) -> list[int]:
        """The delta for further messages: end of the reply, the messages, opening of the next reply.

        Begins with an end-of-turn id, which `segment.observe` leaves out where the model sampled it. Special tokens
        spelled out in the messages are defused: what a tool prints cannot open or close a turn. `tools` matter to
        templates that show them before the last user message (Mistral), `calls` as in `render_tools`.
        Raises `TemplateError`.
        """
        unproven = next((self._unproven[str(m.get("role"))] for m in messages if m.get("role") in self._unproven), None)
        if unproven:
            raise TemplateError(unproven)
        ids = self.encode(self.continuation.delta([self.defused(message) for message in messages], calls, tools))
        if not ids or ids[0] not in self.ends.heads:
            raise TemplateError("the chat template closes a reply differently before these messages")
        return ids

    def without_repeated_end(self, last: int, delta: Sequence[int]) -> Sequence[int]:
        """`delta` as it follows the id `last`: an end that the model sampled stays where it is and is not repeated."""
        return delta[1:] if delta and (delta[0] == last or self.ends.repeats(last, delta[0])) else delta

    def prove(self, tools: Sequence[Mapping[str, Any]] = ()) -> Proof:
        """Check the splice on synthetic conversations. Raises `TemplateError` saying what differs.

        What is left unproven, such as a user's next message, `render` refuses from then on.
        """
        if self.thinking_history == "strip":
            self.old_thinking.check_strip()
        from penstock.agent_loops.proof import prove

        self._unproven = {}
        proof = prove(self, tools)
        self._unproven = proof.unproven
        return proof

    # text and ids --------------------------------------------------------------------------------------------------
    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        """Text of `ids`, character for character; special tokens kept unless `special` is False."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return text

    # helpers -------------------------------------------------------------------------------------------------------
    def _encode_first(self, conversation: str) -> tuple[int, ...]:
        messages, tools = json.loads(conversation)
        return tuple(self.encode(self.template.render(self.template.fitted(messages), tools, prompt=True)))

    def _as_message(self, reply: Reply) -> Message:
        """A sampled reply as a template takes it, to be rendered again."""
        text = self.continuation.special.sub("", reply.text)
        parsed = self.parser.parse(reply.text)
        if parsed.calls and self.template.call_form is not None:
            return self.template.call_message(parsed.calls, self.continuation.special.sub("", parsed.content))
        return {"role": "assistant", "content": text}

    def _with_ids(self, messages: Sequence[Message], calls: Sequence[ToolCall]) -> list[Message]:
        return [self.defused(message) for message in self.continuation.with_calls(messages, calls)]

    def defused(self, message: Message) -> Message:
        """The message with words that open or close a turn made ordinary text where its text spells them."""
        return defused(message, self._turn_words)


def chat_of(model: str, config: AgentConfig) -> ChatTokens:
    """For a model folder or hub name and a run's settings. Raises `TemplateError`, `ValueError` for the parser."""
    return ChatTokens(
        load_tokenizer(model),
        get_parser(config.parser),
        template_settings=config.template_settings,
        thinking_history=config.thinking_history,
    )


def tool_messages(results: Sequence[ToolResult]) -> list[Message]:
    """Results as messages, for `ChatTokens.go_on`."""
    return [{"role": "tool", "content": result.text} for result in results]


def new_budget(config: AgentConfig) -> Budget:
    """A fresh episode's budget."""
    return Budget(max_turns=config.max_turns, max_response_tokens=config.max_response_tokens)
