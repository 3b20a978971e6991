"""What the journal keeps of an answer besides its ids, and how turns are made from it again.

Only what is new since the parent turn is written, and each message or tool list once per episode: a turn costs what was
said in it, however long the conversation is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.agent_loops import TokenMismatch, from_entry
from penstock.gateway.history import History, NotRenderable, Place, Turn
from penstock.gateway.normal import as_json, digest
from penstock.gateway.wire import Ask, Choice, Head, TextOf, read_answer
from penstock.gateway.wire.types import Api, EngineFinish
from penstock.transfer_queue import JournalEntry

ANSWER = "answer"
"""Key of an entry's data: this entry is an answer of a recorded episode."""


class Bodies:
    """Messages and tool lists by digest: which ones the journal holds."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def new(self, values: Iterable[Any]) -> dict[str, str]:
        """Digest → JSON of those that are not in the journal yet."""
        texts = {digest(text): text for text in map(_dump, values)}
        return {name: text for name, text in texts.items() if name not in self._texts}

    def keep(self, texts: Mapping[str, str]) -> None:
        """They are in the journal now."""
        self._texts.update(texts)

    def get(self, name: str) -> Any:
        return json.loads(self._texts[name])


def how_asked(ask: Ask) -> str:
    """What makes two requests on one context the same: another seed is another question."""
    return as_json(
        [ask.api, dict(ask.sampling), ask.n, list(ask.stop), ask.tool_choice, ask.parallel_tool_calls],
    )


def note_of(place: Place, ask: Ask, head: Head, index: int, bodies: Bodies) -> dict[str, Any]:
    """Data of the journal entry of choice `index`."""
    said = [*place.new, *([list(place.tools)] if place.tools and not place.parent else [])]
    return {
        ANSWER: head.answer_id,
        "index": index,
        "created_s": head.created_s,
        "asked": how_asked(ask),
        "parent": place.parent.turn_id if place.parent else "",
        "new": [digest(_dump(message)) for message in place.new],
        "tools": digest(_dump(list(place.tools))) if place.tools and not place.parent else "",
        "prompt": list(place.prompt) if isinstance(place.prompt, tuple) else place.prompt,
        "instructed": place.instructed,
        "bodies": bodies.new(said),
    }


def restore(history: History, entry: JournalEntry, bodies: Bodies, text_of: TextOf) -> Turn | None:
    """Add one entry's answer; None where it is known. Raises `TokenMismatch` where its ids cannot be made again."""
    note = entry.data
    bodies.keep(note["bodies"])
    if f"{note[ANSWER]}.{note['index']}" in history.turns:
        return None
    try:
        place = _place_of(history, note, bodies)
    except (KeyError, NotRenderable) as error:
        raise TokenMismatch("agent", f"answer {note[ANSWER]} of the journal has no place: {error!r}") from error
    if place.asked != (entry.context_len, entry.context_hash):
        raise TokenMismatch("agent", f"the context of {note[ANSWER]} renders to other ids than the engine was fed")
    ask = _ask_of(note["asked"], place)
    generation = from_entry(entry)
    head = head_of(note[ANSWER], note["created_s"], "", place)
    reason: EngineFinish = "length" if generation.finish_reason == "length" else "stop"
    answer = (generation.token_ids, generation.logprobs, reason)
    choice = read_answer(ask, head, note["index"], text_of, answer)
    turn = Turn(note[ANSWER], place, choice, note["asked"], note["created_s"])
    history.add(turn, generation)
    return turn


def head_of(answer_id: str, created_s: int, model: str, place: Place) -> Head:
    return Head(answer_id, created_s, model, len(place.context), place.parent.end if place.parent else 0)


def told_again(turn: Turn, ask: Ask, head: Head, text_of: TextOf) -> Choice:
    """A recorded answer in the form that `ask` wants it in (log-probabilities of tokens or not)."""
    reason: EngineFinish = "length" if turn.choice.finish_reason == "length" else "stop"
    answer = (turn.choice.token_ids, turn.choice.logprobs, reason)
    return read_answer(ask, head, turn.choice.index, text_of, answer)


def _place_of(history: History, note: Mapping[str, Any], bodies: Bodies) -> Place:
    new = tuple(bodies.get(name) for name in note["new"])
    if note["parent"]:
        tools = history.turns[note["parent"]].place.tools
    else:
        tools = tuple(bodies.get(note["tools"])) if note["tools"] else ()
    return history.place_as_noted(note, new, tools)


def _ask_of(asked: str, place: Place) -> Ask:
    api: Api
    api, sampling, n, stop, tool_choice, parallel = json.loads(asked)
    return Ask(
        api=api,
        model="",
        tools=place.tools,
        tool_choice=tool_choice,
        parallel_tool_calls=parallel,
        n=n,
        sampling=sampling,
        stop=tuple(stop),
    )


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
