"""Durable execution of one episode: what happened is answered from the journal, what happens is written to it.

A resumed episode runs its loop from the start. Entries are found by kind and by the hash of what was asked (the exact
context of a model call, the exact calls of a tool turn), each used once.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from penstock.agent_loops.errors import EpisodeRestart
from penstock.transfer_queue import JournalEntry, JournalKind, Lease, TransferQueue

RESTART = "restart"
"""Key in an entry's data: everything before this entry belongs to an abandoned run of the episode."""
LIFE = "life"
"""Key in an entry's data: the name of this run of the episode, of which the names of its tool calls are made."""
SESSIONS = "sandbox_sessions"
"""Key in a tool turn's data: tool → session that holds its state."""
REWARDS = "tool_rewards"
"""Key in an entry's data: what the tools' `calc_reward` said. Their states may be gone from then on."""
NOTES = frozenset({LIFE, REWARDS})


@dataclass(slots=True)
class Replayed:
    """How far an episode followed its journal."""

    sampled: int = 0
    tools: int = 0
    restarts: int = 0


class EpisodeJournal:
    """Owned by one lease; `take` before doing, `append` after doing and before anything depends on it."""

    def __init__(self, queue: TransferQueue, lease: Lease) -> None:
        self._queue = queue
        self._lease = lease
        entries = since_last_restart(lease.journal)
        self._left = [entry for entry in entries if not entry.data or not entry.data.keys() <= NOTES]
        self.replayed = Replayed()
        self.sessions: dict[str, str] = _sessions_of(entries)
        """Tool → session, as this run's earlier owners named them last."""
        self.tool_rewards: Mapping[str, float] | None = _last(entries, REWARDS)
        """What an earlier owner was told by `calc_reward`; None where none was."""
        known = _life_of(lease.journal, entries)
        self._life, self._life_is_durable = known or secrets.token_hex(8), known is not None
        self._branches = 0
        self._strayed = False
        """Something was done anew although entries of its kind were left: they must all be asked for by the end."""

    def take(self, kind: JournalKind, context_hash: int) -> JournalEntry | None:
        """The entry that answers this request, or None where it is to be done now.

        Raises `EpisodeRestart` where entries of the kind are left but none fits: the loop asked for something else
        than it did before, so it is not deterministic and nothing of the old run may be mixed with the new one.
        """
        same_kind = [entry for entry in self._left if entry.kind is kind]
        for entry in same_kind:
            if entry.context_hash == context_hash:
                self._left.remove(entry)
                self._count(kind)
                return entry
        if same_kind and self._branches:
            self._strayed = True
        elif same_kind:
            raise EpisodeRestart(f"the replay asked for another {kind.value} entry than its journal holds")
        return None

    @contextmanager
    def branching(self) -> Iterator[None]:
        """While several parts run side by side, one may ask before another has taken its entries."""
        self._branches += 1
        try:
            yield
        finally:
            self._branches -= 1

    def check_followed(self) -> None:
        """At the loop's end. Raises `EpisodeRestart` where branches left entries behind: the replay strayed."""
        if self._strayed and self._left:
            raise EpisodeRestart(f"the replay asked otherwise than before and left {len(self._left)} journal entries")

    def hand_over(self, keys: Collection[str]) -> tuple[JournalEntry, ...]:
        """Entries whose data has one of `keys`, for a reader of their own; `take` sees them no more."""
        theirs = [entry for entry in self._left if not entry.data.keys().isdisjoint(keys)]
        self._left = [entry for entry in self._left if entry.data.keys().isdisjoint(keys)]
        self.replayed.sampled += sum(entry.kind is JournalKind.SAMPLED for entry in theirs)
        return tuple(theirs)

    async def append(self, entry: JournalEntry) -> None:
        """Write it down. Raises `LeaseLost`, `QueueUnavailable`."""
        await self._queue.journal(self._lease, entry)

    async def append_naming(self, entry: JournalEntry) -> None:
        """The same, and the entry tells this run's name where none did yet."""
        if not self._life_is_durable:
            entry = replace(entry, data={**entry.data, LIFE: self._life})
        await self.append(entry)
        self._life_is_durable = True

    async def life(self) -> str:
        """Name of this run of the episode, the same for each owner and for no other run anywhere; durable."""
        if not self._life_is_durable:
            await self.append_naming(JournalEntry(kind=JournalKind.TOOLS))
        return self._life

    async def keep_rewards(self, rewards: Mapping[str, float]) -> None:
        """Durable before the states that earned them are given back."""
        self.tool_rewards = rewards
        await self.append(JournalEntry(kind=JournalKind.TOOLS, data={REWARDS: dict(rewards)}))

    async def restart(self, cause: str) -> None:
        """Abandon what was replayed; durable, so that a later owner does not follow the old path again."""
        self._left, self.sessions, self.tool_rewards = [], {}, None
        self.replayed.restarts += 1
        self._life, self._life_is_durable = secrets.token_hex(8), False
        await self.append_naming(JournalEntry(kind=JournalKind.TOOLS, data={RESTART: cause}))

    def _count(self, kind: JournalKind) -> None:
        if kind is JournalKind.SAMPLED:
            self.replayed.sampled += 1
        else:
            self.replayed.tools += 1


def since_last_restart(entries: Sequence[JournalEntry]) -> list[JournalEntry]:
    """What belongs to the present run of the episode."""
    marks = [index for index, entry in enumerate(entries) if RESTART in entry.data]
    return list(entries[marks[-1] + 1 :] if marks else entries)


def _life_of(journal: Sequence[JournalEntry], entries: Sequence[JournalEntry]) -> str | None:
    """Of the run that `entries` belong to; the restart before them, where there is one, names it."""
    known: str | None = _last(journal[max(0, len(journal) - len(entries) - 1) :], LIFE)
    return known


def _sessions_of(entries: Sequence[JournalEntry]) -> dict[str, str]:
    return {tool: session for entry in entries for tool, session in entry.data.get(SESSIONS, {}).items()}


def _last(entries: Sequence[JournalEntry], key: str) -> Any:
    return next((entry.data[key] for entry in reversed(entries) if key in entry.data), None)
