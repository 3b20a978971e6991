"""The conversations of an episode as a tree of turns over append-only segments.

    messages of a request ──resolve_prefix──► parent turn + new messages ──► parent's ids + delta of the new = context
    context, answer       ──add─────────────► appended to the parent's segment if it ends there; else a new segment

A turn continues its parent where the messages begin with the whole conversation up to the parent's answer, that answer
included as it was returned. Its context is then the parent's ids as they were fed and sampled, and the delta of the new
messages. Everything else starts a new segment, rendered by the chat template: rewritten histories, other tools,
sub-agents. Where a context is answered more than once (n > 1, repeated requests), each further answer gets a segment
with that context as its prompt: each sampled id is in one segment, and no answer is trained twice.


Messages are compared in a normal form (`normal`), which is never rendered: clients send answers back with further keys
(`refusal`, `annotations`, `audio`), null for absent keys, arguments serialised anew, or text in parts. A call that has
the id and all the arguments of a sampled one is that call: clients fill in defaults of their tools.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from penstock.agent_loops import AgentError, ChatTokens, SegmentBuilder, TemplateError, little_endian
from penstock.gateway.wire.chat import message_of
from penstock.gateway.wire.types import Choice
from penstock.rollout_server import Generation

Tools = tuple[Mapping[str, Any], ...]


class NotRenderable(AgentError):
    """The chat template rejects these messages; the message has the cause."""


@dataclass(eq=False, slots=True)
class Turn:
    """One answer of the model and its position in the tree."""

    answer_id: str
    """Id of the request's answer; n choices share it."""
    match: PrefixMatch
    choice: Choice
    request_key: str
    """The request's sampling key."""
    created_s: int
    echo: Mapping[str, str] = field(default_factory=dict)
    """/v1/responses only: what its answer repeats of the request, as digests of the journal's bodies."""
    segment: SegmentBuilder = field(init=False)
    end: int = 0
    """Length of the segment's context right after the answer."""
    continued: bool = False

    @property
    def turn_id(self) -> str:
        return f"{self.answer_id}.{self.choice.index}"

    def ids(self) -> list[int]:
        """Returns all ids up to the end of the answer."""
        return self.segment.context()[: self.end]

    @property
    def is_last(self) -> bool:
        """True if its segment ends with it."""
        return self.end == self.segment.context_len

    @property
    def new(self) -> tuple[Message, ...]:
        """The messages after the parent's answer, without instructions of a single request."""
        return self.match.new[1:] if self.match.instructed else self.match.new

    def path(self) -> list[Turn]:
        """The turns from the first one of its conversation to itself."""
        turns = [self]
        while (parent := turns[-1].match.parent) is not None:
            turns.append(parent)
        return turns[::-1]

    def conversation(self) -> list[Message]:
        """All messages up to the answer, included, without instructions of a single request."""
        return [message for turn in self.path() for message in (*turn.new, message_of(turn.choice))]


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Position of a request in the tree: behind `parent`, or at the beginning of a new segment."""

    parent: Turn | None
    new: tuple[Message, ...]
    """Messages after the parent's answer; all messages of a new segment."""
    tools: Tools
    prompt: str | tuple[int, ...] | None
    """/v1/completions: text or ids after the parent's answer."""
    instructed: bool
    """The first message holds the instructions of a single request (/v1/responses)."""
    key: str
    """Key of the conversation before the answer."""
    delta: tuple[int, ...]
    """Ids of the new messages; of a new segment, its prompt."""
    context: tuple[int, ...]
    """The exact ids that the model is fed."""
    context_key: tuple[int, int]
    """(length, xxh3-64) of the context, as in the journal."""

    @property
    def routed_up_to(self) -> int:
        """Number of routed positions of the segment that the answer will be added to."""
        return self.parent.segment.routed_up_to if self.parent is not None and self.parent.is_last else 0

    @property
    def may_be_known_elsewhere(self) -> bool:
        """The new messages hold an unknown answer: rewritten by the client, or recorded by another server."""
        if self.prompt is not None:
            return self.parent is None
        return any(message.get("role") == "assistant" for message in self.new)


class PrefixTree:
    """One episode's turns. Callers of `add`, and of other methods in a thread, hold the session's lock."""

    def __init__(self, chat: ChatTokens) -> None:
        """`chat.budget` is the episode's budget."""
        self.chat = chat
        self.turns: dict[str, Turn] = {}
        self.segments: list[SegmentBuilder] = []
        """Segments in the order of their first answer."""
        self._after: dict[str, list[Turn]] = {}
        """Key of a conversation that ends with a recorded answer → turns with that answer."""
        self._calls: dict[str, Mapping[str, Any]] = {}
        """Id of a sampled call → the call, as `message_of` has it."""
        self._answers: dict[tuple[tuple[int, int], str], list[Turn]] = {}

    # where a request belongs ---------------------------------------------------------------------------------------
    def resolve_prefix(self, messages: Sequence[Message], tools: Tools, *, instructed: bool = False) -> PrefixMatch:
        """Returns the recorded turn that the messages continue, or a new segment. Raises `NotRenderable`."""
        messages = [self._as_sampled(message) for message in messages]
        keys = [first_key(tools)]
        for message in messages:
            keys.append(next_key(keys[-1], message))
        for count in range(len(messages), 0, -1):
            parent = self._answered(keys[count]) if messages[count - 1].get("role") == "assistant" else None
            match = parent and self._continue(parent, tuple(messages[count:]), tools, keys[-1])
            if match:
                return match
        return self._new_segment(tuple(messages), tools, keys[-1], instructed)

    def resolve_prompt(self, prompt: str | tuple[int, ...]) -> PrefixMatch:
        """The same for a bare prompt: text continues the text of an earlier answer, ids its ids."""
        for turn in reversed(self.turns.values()):
            rest = self._rest_of(turn, prompt)
            if rest is not None:
                return self._prompt_match(turn, rest)
        return self._prompt_match(None, prompt)

    def resolve_recorded(self, note: Mapping[str, Any], new: tuple[Message, ...], tools: Tools) -> PrefixMatch:
        """The position that a journal entry names. Raises `KeyError`, `NotRenderable`."""
        parent = self.turns[note["parent"]] if note.get("parent") else None
        if (prompt := note.get("prompt")) is not None:
            return self._prompt_match(parent, prompt if isinstance(prompt, str) else tuple(prompt))
        key = self._key_after(parent) if parent else first_key(tools)
        for message in new:
            key = next_key(key, message)
        if parent is None:
            return self._new_segment(new, tools, key, bool(note.get("instructed")))
        match = self._continue(parent, new, tools, key)
        if match is None:
            raise NotRenderable("the chat template no longer continues this conversation")
        return match

    def _as_sampled(self, message: Message) -> Message:
        """The message with its calls as the model wrote them, where the client only added arguments to them."""
        if message.get("role") != "assistant" or not message.get("tool_calls"):
            return message
        return {**message, "tool_calls": [self._call_as_sampled(call) for call in message["tool_calls"]]}

    def _call_as_sampled(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        sampled = self._calls.get(str(call.get("id")))
        if sampled is None:
            return call
        (_, name, sent), (_, own_name, own) = _call(call), _call(sampled)
        return sampled if name == own_name and _holds(sent, own) else call

    def _answered(self, key: str) -> Turn | None:
        """Return a turn with this conversation that was not continued yet."""
        turns = self._after.get(key, [])
        return next((turn for turn in turns if not turn.continued), turns[0] if turns else None)

    def _continue(self, parent: Turn, new: tuple[Message, ...], tools: Tools, key: str) -> PrefixMatch | None:
        """None where the template closes a reply differently before such messages, or drops old thinking."""
        before = parent.ids()
        if self.chat.begins_anew(before, new):
            return None
        try:
            delta = self.chat.render(new, tools, parent.choice.calls)
        except TemplateError:
            return None
        fed = tuple(self.chat.without_repeated_end(before[-1], delta))
        return _prefix_match(parent, before, fed, new=new, tools=tools, key=key)

    def _new_segment(self, messages: tuple[Message, ...], tools: Tools, key: str, instructed: bool) -> PrefixMatch:
        try:
            ids = self.chat.prompt_ids([self.chat.defused(message) for message in messages], tools)
        except TemplateError as error:
            raise NotRenderable(str(error)) from error
        return _prefix_match(None, [], ids, new=messages, tools=tools, key=key, instructed=instructed)

    def _prompt_match(self, parent: Turn | None, prompt: str | tuple[int, ...]) -> PrefixMatch:
        delta = self._encoded(prompt) if isinstance(prompt, str) else prompt
        before = parent.ids() if parent else []
        if not before and not delta:
            raise NotRenderable("the prompt has no tokens")
        return _prefix_match(parent, before, delta, prompt=prompt)

    def _encoded(self, text: str) -> tuple[int, ...]:
        try:
            return tuple(self.chat.encode(text))
        except TemplateError as error:
            raise NotRenderable(str(error)) from error

    def _rest_of(self, turn: Turn, prompt: str | tuple[int, ...]) -> str | tuple[int, ...] | None:
        """Return the text or ids that `prompt` adds to a turn that answered a bare prompt; None if it does not continue
        it.
        """
        if turn.match.prompt is None or type(prompt) is not type(turn.match.prompt):
            return None
        whole: Any = self._prompt_text(turn) if isinstance(prompt, str) else tuple(turn.ids())
        return prompt[len(whole) :] if prompt[: len(whole)] == whole else None

    def _prompt_text(self, turn: Turn) -> str:
        return "".join(str(one.match.prompt) + self.chat.decode(one.choice.token_ids) for one in turn.path())

    # answers -------------------------------------------------------------------------------------------------------
    def add(self, turn: Turn, generation: Generation) -> None:
        """Adds an answer that is in the journal; sets `turn.segment` and `turn.end`."""
        match = turn.match
        parent = match.parent
        if parent is not None and parent.is_last:
            turn.segment = parent.segment
            turn.segment.append_fed(match.delta)
        else:
            turn.segment = SegmentBuilder(match.context, self.chat.budget, self.chat.stop_token_ids)
            self.segments.append(turn.segment)
        turn.segment.append_sampled(generation)
        turn.end = turn.segment.context_len
        turn.match = replace(match, delta=(), context=())  # the segment holds them; copies would grow with turns²
        if parent is not None:
            parent.continued = True
        self.turns[turn.turn_id] = turn
        self._calls |= {call["id"]: call for call in message_of(turn.choice).get("tool_calls", ())}
        self._answers.setdefault((match.context_key, turn.request_key), []).append(turn)
        if match.prompt is None:
            self._after.setdefault(self._key_after(turn), []).append(turn)

    def answers(self, match: PrefixMatch, request: str) -> list[Turn]:
        """The choices of the newest equal request on the same context."""
        turns = self._answers.get((match.context_key, request), [])
        return [turn for turn in turns if turn.answer_id == turns[-1].answer_id]

    def _key_after(self, turn: Turn) -> str:
        return next_key(turn.match.key, message_of(turn.choice))


def _prefix_match(
    parent: Turn | None,
    before: Sequence[int],
    delta: tuple[int, ...],
    *,
    new: tuple[Message, ...] = (),
    tools: Tools = (),
    key: str = "",
    prompt: str | tuple[int, ...] | None = None,
    instructed: bool = False,
) -> PrefixMatch:
    context = (*before, *delta)
    return PrefixMatch(parent, new, tools, prompt, instructed, key, delta, context, (len(context), hash_of(context)))


def hash_of(ids: Sequence[int]) -> int:
    """xxh3-64 of the int32 little-endian ids, as `SegmentBuilder.context_hash`."""
    return xxhash.xxh3_64_intdigest(little_endian(array("i", ids)))


Message = Mapping[str, Any]
ROLES = {"developer": "system"}


def digest(text: str) -> str:
    """128-bit digest of a text, as hexadecimal."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def as_json(value: Any) -> str:
    """Canonical JSON."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def first_key(tools: Sequence[Mapping[str, Any]]) -> str:
    """Returns the key of an empty conversation. Conversations with other tools have another key."""
    return digest(as_json(list(tools)))


def next_key(key: str, message: Message) -> str:
    """Key of the conversation `key` with one more message."""
    return digest(f"{key} {as_json(normal(message))}")


def normal(message: Message) -> list[Any]:
    """[role, text, other parts, calls, tool_call_id, name], without what does not change the meaning.

    Of an assistant: [role, text, other parts, calls], and its thinking if there is some.
    """
    role = ROLES.get(str(message.get("role")), message.get("role"))
    text, parts = _text_of(message.get("content"))
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    if role == "assistant":
        thinking, text = _thinking(text, message)
        return [role, text, parts, calls, *([thinking] if thinking else [])]
    return [role, text, parts, calls, message.get("tool_call_id") or "", message.get("name") or ""]


def _thinking(text: str, message: Message) -> tuple[str, str]:
    """(thinking, text), without the space around them.

    Some clients cut ``<think>`` out of an answer's text and send it back as `reasoning_content`.
    """
    before, _, rest = text.partition("<think>")
    inner, closing, after = rest.partition("</think>")
    if closing and not before.strip():
        return inner.strip(), after.strip()
    return str(message.get("reasoning_content") or "").strip(), text.strip()


def _text_of(content: Any) -> tuple[str, list[Any]]:
    """The texts of all parts, joined in order, and the other parts."""
    if content is None or isinstance(content, str):
        return content or "", []
    if not isinstance(content, Sequence):
        return "", [content]
    texts = [part for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    return "".join(part["text"] for part in texts), [part for part in content if part not in texts]


def _call(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function") or call
    return [call.get("id") or "", function.get("name"), _arguments(function.get("arguments"))]


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return _numbers(arguments) if arguments is not None else {}
    try:
        return _numbers(json.loads(arguments or "{}"))
    except ValueError:
        return arguments


def _holds(sent: Any, own: Any) -> bool:
    """Return True if `sent` is `own` with nothing but keys added to its objects. Both are of `_arguments`."""
    if isinstance(sent, Mapping) and isinstance(own, Mapping):
        return all(name in sent and _holds(sent[name], one) for name, one in own.items())
    if isinstance(sent, list) and isinstance(own, list):
        return len(sent) == len(own) and all(map(_holds, sent, own))
    return type(sent) is type(own) and bool(sent == own)


def _numbers(value: Any) -> Any:
    """Each number as the nearest double: JavaScript sends 5.0 back as 5, and no integer above 2**53 exactly."""
    if isinstance(value, Mapping):
        return {name: _numbers(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(one) for one in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) <= sys.float_info.max else value
    return value + 0.0 if isinstance(value, float) else value  # -0.0 is 0
