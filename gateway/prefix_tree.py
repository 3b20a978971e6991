"""What was said in an episode, as a tree of turns over append-only segments.

    messages of a request ──place──► parent turn + what is new ──► exact ids of parent + delta of the new = context
    context, answer       ──add────► the parent's segment goes on where it ended; elsewhere a new segment begins

A turn continues its parent where the messages begin with everything that was said up to the parent's answer, that
answer included as it was returned. Its context is then the parent's ids as they were fed and sampled, and the delta of
the new messages. Everything else is a new segment, rendered by the chat template: rewritten histories, other
tools, sub-agents. Where something is answered that was answered already (n > 1, asked again), the context of each
further answer is the prompt of a segment of its own: each sampled id is in one place, no answer is trained twice.

What makes two messages the same: for comparison only, never for rendering.

A client sends back what it was given, but not in the same letters: it adds keys (`refusal`, `annotations`, `audio`),
writes null for what was left out, serialises arguments anew, or puts text into parts. None of this is another history.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from penstock.agent_loops import AgentError, ChatTokens, SegmentBuilder, TemplateError, little_endian
from penstock.gateway.wire import Choice, message_of
from penstock.rollout_server import Generation

Tools = tuple[Mapping[str, Any], ...]


class NotRenderable(AgentError):
    """The chat template refuses these messages; the message says why."""


@dataclass(eq=False, slots=True)
class Turn:
    """One answer of the model, in its place."""

    answer_id: str
    """Of the call; n choices share it."""
    place: Place
    choice: Choice
    asked: str
    """How it was asked, as JSON: sampling, stop …"""
    created_s: int
    segment: SegmentBuilder = field(init=False)
    end: int = 0
    """Length of the segment's context right after the answer."""
    continued: bool = False

    @property
    def turn_id(self) -> str:
        return f"{self.answer_id}.{self.choice.index}"

    def ids(self) -> list[int]:
        """Everything up to the end of the answer."""
        return self.segment.context()[: self.end]

    @property
    def is_last(self) -> bool:
        """Its segment ends with it."""
        return self.end == self.segment.context_len

    def conversation(self) -> list[Message]:
        """Everything said up to and with the answer, without instructions that held for one request only."""
        before = self.place.parent.conversation() if self.place.parent else []
        new = self.place.new[1:] if self.place.instructed else self.place.new
        return [*before, *new, message_of(self.choice)]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an answer belongs: behind `parent`, or at the beginning of a new segment."""

    parent: Turn | None
    new: tuple[Message, ...]
    """What was said after the parent's answer; of a new segment, everything."""
    tools: Tools
    prompt: str | tuple[int, ...] | None
    """/v1/completions: what follows the parent's answer, as text or ids."""
    instructed: bool
    """The first of all messages is the instructions of a single request (/v1/responses)."""
    key: str
    """Of the conversation before the answer."""
    delta: tuple[int, ...]
    """Ids of what is new; of a new segment, its prompt."""
    context: tuple[int, ...]
    """Exactly what the model is fed."""
    asked: tuple[int, int]
    """(length, xxh3-64) of the context, as the journal has them."""

    @property
    def may_be_known_elsewhere(self) -> bool:
        """What is new holds an answer that this history does not know: rewritten, or recorded by another sidecar."""
        if self.prompt is not None:
            return self.parent is None
        return any(message.get("role") == "assistant" for message in self.new)


class History:
    """One episode's turns. Not for several writers: who adds holds the episode's lock."""

    def __init__(self, chat: ChatTokens) -> None:
        """`chat.budget` is the episode's."""
        self.chat = chat
        self.turns: dict[str, Turn] = {}
        self.segments: list[SegmentBuilder] = []
        """In the order of their first answer."""
        self._after: dict[str, list[Turn]] = {}
        """Key of a conversation that ends in our answer → turns that answered so."""
        self._answers: dict[tuple[tuple[int, int], str], list[Turn]] = {}

    # where a request belongs ---------------------------------------------------------------------------------------
    def place(self, messages: Sequence[Message], tools: Tools, *, instructed: bool = False) -> Place:
        """Raises `NotRenderable`."""
        keys = [first_key(tools)]
        for message in messages:
            keys.append(next_key(keys[-1], message))
        for count in range(len(messages), 0, -1):
            parent = self._answered(keys[count]) if messages[count - 1].get("role") == "assistant" else None
            place = parent and self._behind(parent, tuple(messages[count:]), tools, keys[-1])
            if place:
                return place
        return self._beginning(tuple(messages), tools, keys[-1], instructed)

    def place_prompt(self, prompt: str | tuple[int, ...]) -> Place:
        """The same for a bare prompt: text goes on from the text of an earlier answer, ids from its ids."""
        for turn in reversed(self.turns.values()):
            rest = self._rest_of(turn, prompt)
            if rest is not None:
                return self._prompt_place(turn, rest)
        return self._prompt_place(None, prompt)

    def place_as_noted(self, note: Mapping[str, Any], new: tuple[Message, ...], tools: Tools) -> Place:
        """The place that a journal's note names. Raises `KeyError`, `NotRenderable`."""
        parent = self.turns[note["parent"]] if note.get("parent") else None
        if (prompt := note.get("prompt")) is not None:
            return self._prompt_place(parent, prompt if isinstance(prompt, str) else tuple(prompt))
        key = self._key_after(parent) if parent else first_key(tools)
        for message in new:
            key = next_key(key, message)
        if parent is None:
            return self._beginning(new, tools, key, bool(note.get("instructed")))
        place = self._behind(parent, new, tools, key)
        if place is None:
            raise NotRenderable("the chat template does not continue what it continued before")
        return place

    def _answered(self, key: str) -> Turn | None:
        """Of turns that said the same, one that nothing followed yet."""
        turns = self._after.get(key, [])
        return next((turn for turn in turns if not turn.continued), turns[0] if turns else None)

    def _behind(self, parent: Turn, new: tuple[Message, ...], tools: Tools, key: str) -> Place | None:
        """None where the template closes a reply differently before such messages, or old thinking is to be dropped."""
        before = parent.ids()
        if self.chat.begins_anew(before, new):
            return None
        try:
            delta = self.chat.render(new, tools, parent.choice.calls)
        except TemplateError:
            return None
        delta = list(self.chat.without_repeated_end(before[-1], delta))
        return _placed(parent, before, tuple(delta), new=new, tools=tools, key=key)

    def _beginning(self, messages: tuple[Message, ...], tools: Tools, key: str, instructed: bool) -> Place:
        try:
            ids = self.chat.prompt_ids([self.chat.defused(message) for message in messages], tools)
        except TemplateError as error:
            raise NotRenderable(str(error)) from error
        return _placed(None, [], ids, new=messages, tools=tools, key=key, instructed=instructed)

    def _prompt_place(self, parent: Turn | None, prompt: str | tuple[int, ...]) -> Place:
        delta = tuple(self.chat.encode(prompt)) if isinstance(prompt, str) else prompt
        before = parent.ids() if parent else []
        if not before and not delta:
            raise NotRenderable("the prompt has no tokens")
        return _placed(parent, before, delta, prompt=prompt)

    def _rest_of(self, turn: Turn, prompt: str | tuple[int, ...]) -> str | tuple[int, ...] | None:
        """What `prompt` adds to a turn that answered a bare prompt; None where it does not go on from it."""
        if turn.place.prompt is None or type(prompt) is not type(turn.place.prompt):
            return None
        whole: Any = self._prompt_text(turn) if isinstance(prompt, str) else tuple(turn.ids())
        return prompt[len(whole) :] if prompt[: len(whole)] == whole else None

    def _prompt_text(self, turn: Turn) -> str:
        before = self._prompt_text(turn.place.parent) if turn.place.parent else ""
        return before + str(turn.place.prompt) + self.chat.decode(turn.choice.token_ids)

    # answers -------------------------------------------------------------------------------------------------------
    def add(self, turn: Turn, generation: Generation) -> None:
        """Append an answer that is in the journal. `turn.segment` and `turn.end` are set here."""
        place = turn.place
        parent = place.parent
        if parent is not None and parent.is_last:
            turn.segment = parent.segment
            turn.segment.append_fed(place.delta)
        else:
            turn.segment = SegmentBuilder(place.context, self.chat.budget, self.chat.stop_token_ids)
            self.segments.append(turn.segment)
        turn.segment.append_sampled(
            generation.token_ids, generation.logprobs, generation.version_spans, generation.finish_reason
        )
        turn.end = turn.segment.context_len
        turn.place = replace(place, delta=(), context=())  # the segment has them; kept twice they grow with turns²
        if parent is not None:
            parent.continued = True
        self.turns[turn.turn_id] = turn
        self._answers.setdefault((place.asked, turn.asked), []).append(turn)
        if place.prompt is None:
            self._after.setdefault(self._key_after(turn), []).append(turn)

    def answers(self, place: Place, asked: str) -> list[Turn]:
        """Of the newest call that asked the same on the same context; by choice."""
        turns = self._answers.get((place.asked, asked), [])
        return [turn for turn in turns if turn.answer_id == turns[-1].answer_id]

    def _key_after(self, turn: Turn) -> str:
        return next_key(turn.place.key, message_of(turn.choice))


def _placed(
    parent: Turn | None,
    before: Sequence[int],
    delta: tuple[int, ...],
    *,
    new: tuple[Message, ...] = (),
    tools: Tools = (),
    key: str = "",
    prompt: str | tuple[int, ...] | None = None,
    instructed: bool = False,
) -> Place:
    context = (*before, *delta)
    return Place(parent, new, tools, prompt, instructed, key, delta, context, (len(context), hash_of(context)))


def hash_of(ids: Sequence[int]) -> int:
    """xxh3-64 of the int32 little-endian ids, as `SegmentBuilder.context_hash`."""
    return xxhash.xxh3_64_intdigest(little_endian(array("i", ids)))


Message = Mapping[str, Any]
ROLES = {"developer": "system"}


def digest(text: str) -> str:
    """Names a text; 128 bits."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def as_json(value: Any) -> str:
    """One spelling per value."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def first_key(tools: Sequence[Mapping[str, Any]]) -> str:
    """Of a conversation in which nothing was said yet; other tools are another conversation."""
    return digest(as_json(list(tools)))


def next_key(key: str, message: Message) -> str:
    """Of the conversation `key` with one message more."""
    return digest(f"{key} {as_json(normal(message))}")


def normal(message: Message) -> list[Any]:
    """[role, text, further parts, calls, tool_call_id, name] with everything left out that says nothing."""
    role = ROLES.get(str(message.get("role")), message.get("role"))
    text, parts = _text_of(message.get("content"))
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    if role == "assistant":
        return [role, text.strip(), parts, calls]
    return [role, text, parts, calls, message.get("tool_call_id") or "", message.get("name") or ""]


def _text_of(content: Any) -> tuple[str, list[Any]]:
    """Texts of all parts in order, and the parts that are no text."""
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
        return arguments if arguments is not None else {}
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments
