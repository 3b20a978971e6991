"""Durable execution of one episode: what happened is answered from the journal, what happens is written to it.

A resumed episode runs its loop from the start. Entries are found by kind and by the hash of what was asked (the exact
context of a model call, the exact calls of a tool turn), each used once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.agent_loops.errors import EpisodeRestart
from penstock.transfer_queue.ledger import Lease, Ledger
from penstock.transfer_queue.trajectory import JournalEntry, JournalKind

RESTART = "restart"
"""Key in an entry's data: everything before this entry belongs to an abandoned run of the episode."""


@dataclass(slots=True)
class Replayed:
    """How far an episode followed its journal."""

    sampled: int = 0
    tools: int = 0
    restarts: int = 0


class EpisodeJournal:
    """Owned by one lease; `take` before doing, `append` after doing and before anything depends on it."""

    def __init__(self, ledger: Ledger, lease: Lease) -> None:
        self._ledger = ledger
        self._lease = lease
        self._left = since_last_restart(lease.journal)
        self.replayed = Replayed()
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
        """Write it down. Raises `LeaseLost`, `LedgerUnavailable`."""
        await self._ledger.journal(self._lease, entry)

    async def restart(self, cause: str) -> None:
        """Abandon what was replayed; durable, so that a later owner does not follow the old path again."""
        self._left = []
        self.replayed.restarts += 1
        data: Mapping[str, Any] = {RESTART: cause}
        await self.append(JournalEntry(kind=JournalKind.TOOLS, data=data))

    def _count(self, kind: JournalKind) -> None:
        if kind is JournalKind.SAMPLED:
            self.replayed.sampled += 1
        else:
            self.replayed.tools += 1


def since_last_restart(entries: Sequence[JournalEntry]) -> list[JournalEntry]:
    """What belongs to the present run of the episode."""
    marks = [index for index, entry in enumerate(entries) if RESTART in entry.data]
    return list(entries[marks[-1] + 1 :] if marks else entries)
