"""What the journal keeps of an answer besides its ids, and how turns are made from it again.

Only what is new since the parent turn is written, and each message or tool list once per episode: a turn costs what was
said in it, however long the conversation is.

What is durable of one recorded episode: its journal, and the history that is made from it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.agent_loops import (
    EpisodeJournal,
    EpisodeLLM,
    TokenMismatch,
    from_entry,
    since_last_restart,
    to_entry,
    usual_sampling,
)
from penstock.agent_loops.chat import new_budget
from penstock.gateway.context import CaptureParts
from penstock.gateway.prefix_tree import History, NotRenderable, Place, Turn, as_json, digest, hash_of
from penstock.gateway.requests import Call
from penstock.gateway.wire import Ask, Choice, Head, TextOf, read_answer
from penstock.gateway.wire.types import Api, EngineFinish
from penstock.rollout_server import Generation
from penstock.transfer_queue import JournalEntry, JournalKind, Lease, QueueError

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


NOTED = "noted"
"""Key of an entry's data: facts of the episode that are no answer (reward, truncation)."""


class Record:
    """Answers enter journal and history one by one, in the same order; the journal first.

    Raises `TokenMismatch` where the journal of `lease` cannot be followed.
    """

    def __init__(self, parts: CaptureParts, lease: Lease) -> None:
        chat = parts.chat.for_episode(new_budget(parts.config))
        sampling = usual_sampling(parts.config, chat.stop_token_ids, lease)
        self.lease = lease
        self.budget = chat.budget
        self.history = History(chat)
        self.facts: dict[str, Any] = {}
        """``reward``, ``turn_rewards``, ``truncated``: as journaled last."""
        self.text_of = parts.text_of
        self.unsure = False
        """The queue may hold an answer that is not known here."""
        self._parts = parts
        self._journal = EpisodeJournal(parts.queue, lease)
        self.llm = EpisodeLLM(parts.client, lease, self._journal, sampling, chat.decode)
        self._bodies = Bodies()
        self._writing = asyncio.Lock()
        self._absorb(lease)

    async def write(self, call: Call, place: Place, choice: Choice, generation: Generation) -> None:
        """A whole answer. Raises `QueueError`; it may be in the journal then, or not."""
        turn = Turn(call.head.answer_id, place, choice, how_asked(call.ask), call.head.created_s)
        async with self._writing:
            note = note_of(place, call.ask, call.head, choice.index, self._bodies)
            try:
                await self._journal.append(to_entry(generation, place.asked, note))
            except QueueError:
                self.unsure = True
                raise
            self._bodies.keep(note["bodies"])
            self.history.add(turn, generation)
            self._remember(turn, generation)

    async def note(self, **facts: Any) -> None:
        """Facts that are not noted yet; the newest of each name counts. Raises `QueueError`."""
        if any(self.facts.get(name) != value for name, value in facts.items()):
            await self._journal.append(JournalEntry(kind=JournalKind.TOOLS, data={NOTED: facts}))
            self.facts.update(facts)

    async def refresh(self) -> None:
        """Take in what other sidecars recorded under this lease. Raises `QueueError`, `TokenMismatch`."""
        async with self._writing:
            self._absorb(await self._parts.queue.adopt(self.lease.episode_id, self.lease.fence))
            self.unsure = False

    def _absorb(self, lease: Lease) -> None:
        for entry in since_last_restart(lease.journal):
            if NOTED in entry.data:
                self.facts.update(entry.data[NOTED])
            elif ANSWER in entry.data and (turn := restore(self.history, entry, self._bodies, self.text_of)):
                self._remember(turn, from_entry(entry))

    def _remember(self, turn: Turn, generation: Generation) -> None:
        self.llm.remember(turn.place.asked, (turn.end, hash_of(turn.ids())), generation)
