"""What is durable of one recorded episode: its journal, and the history that is made from it."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.agent_loops import (
    EpisodeJournal,
    EpisodeLLM,
    from_entry,
    new_budget,
    since_last_restart,
    to_entry,
    usual_sampling,
)
from penstock.gateway.call import Call
from penstock.gateway.history import History, Place, Turn, hash_of
from penstock.gateway.note import ANSWER, Bodies, how_asked, note_of, restore
from penstock.gateway.parts import CaptureParts
from penstock.gateway.wire import Choice
from penstock.rollout_server import Generation
from penstock.transfer_queue import JournalEntry, JournalKind, Lease, QueueError

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
