"""The shared log of what owners of an episode journaled, by which the next owner checks what the queue hands it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from faults.episodes import entry_print
from faults.records import Records, read_records
from penstock.transfer_queue import JournalEntry, Lease


class JournalBroken(AssertionError):
    """A lease came with other entries than the owners before journaled."""


class JournalBook:
    """One file per episode that is under way. Only processes die here, never the machine: no fsync."""

    def __init__(self, folder: Path, *, may_lose_tail: bool) -> None:
        self._folder = folder
        self._may_lose_tail = may_lose_tail

    def write(self, lease: Lease, kind: str, entry: JournalEntry) -> None:
        """`kind` is ``about`` before the queue is told, ``told`` after it answered."""
        records = Records(self._path(lease.episode_id), durable=False)
        try:
            records.write(kind, entry=entry_print(entry), fence=lease.fence)
        finally:
            records.close()

    def close(self, episode_id: str) -> None:
        """The episode is acknowledged: nobody will resume it, unless that is lost."""
        if not self._may_lose_tail:
            self._path(episode_id).unlink(missing_ok=True)

    def check(self, lease: Lease) -> None:
        """Raises `JournalBroken` unless the lease's journal is, in order, what was journaled.

        Entries whose owner saw no answer may be there or not; a queue that lost its tail may miss the newest. What
        later owners journaled, because this lease ran out before its owner came to it, does not count.
        """
        records = read_records(self._path(lease.episode_id))
        if not self._may_lose_tail:
            records = [record for record in records if record["fence"] < lease.fence]
        journal = [entry_print(entry) for entry in lease.journal]
        begun = [record["entry"] for record in records if record["kind"] == "about"]
        told = [record["entry"] for record in records if record["kind"] == "told"]
        if not _in_order(journal, begun) or not (self._may_lose_tail or _in_order(told, journal)):
            raise JournalBroken(f"{lease.episode_id}@{lease.fence}: {journal}, but journaled was {records}")

    def _path(self, episode_id: str) -> Path:
        return self._folder / f"{episode_id.replace('/', '_')}.jsonl"


def _in_order(part: Sequence[str], whole: Sequence[str]) -> bool:
    """Whether `part` is `whole` with some left out."""
    rest = iter(whole)
    return all(item in rest for item in part)
