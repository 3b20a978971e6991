"""Durable execution of one episode: past calls are answered from the journal, new ones are appended to it.

A resumed episode runs its loop from the start. Entries are found by kind and by the hash of the request (the exact
context of a model call, the exact calls of a tool turn); each is used once. A branch is resumed from the entries that
it shares with its parent, without the names of the parent's run, boxes and rewards.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from penstock.agent_loops.errors import AgentError, EpisodeRestart
from penstock.transfer_queue import JournalEntry, JournalKind, JournalMismatch, Lease, Origin, QueueError, TransferQueue

RESTART = "restart"
"""Key in an entry's data: everything before this entry belongs to an abandoned run of the episode."""
LIFE = "life"
"""Key in an entry's data: the name of this run of the episode, the prefix of its tool calls' names."""
SESSIONS = "sandbox_sessions"
"""Key in a tool turn's data: tool → session that holds its state."""
REWARDS = "tool_rewards"
"""Key in an entry's data: the results of the tools' `calc_reward`. Their states may be gone afterwards."""
SCORE = "score"
"""Key in an entry's data: a `RecordedScore`."""
UNREPEATABLE = "unrepeatable"
"""Key in a tool turn's data: a call of it changed a state that a replay of the calls does not restore."""
NOTES = frozenset({LIFE, REWARDS, SCORE})
"""Keys of entries that answer no call."""
MISMATCHES_ALLOWED = 100
"""Mismatches in one append. Each is an entry of another process with this lease, or a machine of the queue that
died.
"""


@dataclass(slots=True)
class Replayed:
    """Counts of calls answered from the journal."""

    sampled: int = 0
    tools: int = 0
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class RecordedScore:
    """A reward that was computed before its worker died."""

    of: str
    """Digest of what was scored."""
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JournaledTurn:
    """A model call of an episode's run."""

    position: int
    """Place of its entry in the journal."""
    is_restorable: bool
    """The tools' states before it can be restored in a branch."""
    entry: JournalEntry


class EpisodeJournal:
    """Owned by one lease; `take` before a call, `append` after it and before its result is used."""

    def __init__(self, queue: TransferQueue, lease: Lease) -> None:
        self._queue = queue
        self._lease = lease
        self._all = list(lease.journal)
        """Entries that the queue should hold, in order."""
        self._durable = len(self._all)
        """Number of entries of `_all` that the queue has acknowledged."""
        self._unsure = False
        """An append got no answer: the queue may hold one entry more."""
        self._appending = asyncio.Lock()
        self._origin = lease.origin
        readable = _readable(lease)
        entries = since_last_restart(readable)
        self._remaining = [entry for entry in entries if not _is_note(entry)]
        self.replayed = Replayed()
        self.sessions: dict[str, str] = {}
        """Tool → session, as recorded last by earlier owners of this run."""
        for entry in entries:
            self.sessions |= entry.data.get(SESSIONS, {})
        self.tool_rewards: Mapping[str, float] | None = _last(entries, REWARDS)
        """Results of `calc_reward` recorded by an earlier owner; None: none yet."""
        score = _last(entries, SCORE)
        self.score = RecordedScore(**score) if score else None
        """The reward recorded last by an earlier owner; what it scored is not necessarily what is scored now."""
        known: str | None = _last(readable, LIFE)  # a restart names its run
        self._life, self._life_is_durable = known or secrets.token_hex(8), known is not None
        self._branches = 0
        self._strayed = False
        """A call ran although entries of its kind were left: all of them must be taken by the end."""

    def take(self, kind: JournalKind, context_hash: int) -> JournalEntry | None:
        """The entry that answers this request; None: it must be executed now.

        Raises `EpisodeRestart` if entries of the kind are left but none matches: the loop is not deterministic, and
        the old run must not be mixed with the new one.
        """
        same_kind = [entry for entry in self._remaining if entry.kind is kind]
        for entry in same_kind:
            if entry.context_hash == context_hash:
                self._remaining.remove(entry)
                self.replayed.sampled += kind is JournalKind.SAMPLED
                self.replayed.tools += kind is JournalKind.TOOLS
                return entry
        if same_kind and self._branches:
            self._strayed = True
        elif same_kind:
            raise EpisodeRestart(f"the replay requested a {kind.value} entry that its journal does not hold")
        return None

    @property
    def origin(self) -> Origin | None:
        """The place where this run left another episode; None for a root, and after a restart."""
        if self._origin is None or any(RESTART in entry.data for entry in self._all[self._origin.entries :]):
            return None
        shared = since_last_restart(self._all[: self._origin.entries])  # what its parent gave up is not shared
        return replace(self._origin, sampled=sum(len(entry.ids) for entry in shared if entry.ids is not None))

    @property
    def turns(self) -> list[JournaledTurn]:
        """Model calls of this run so far, in the order of their answers."""
        begin = len(self._all) - len(since_last_restart(self._all))
        return [
            JournaledTurn(position, self._is_restorable(position), entry)
            for position, entry in enumerate(self._all[begin:], begin)
            if entry.kind is JournalKind.SAMPLED
        ]

    def _is_restorable(self, position: int) -> bool:
        """Returns True if the tools' states at this place of the journal can be restored in a branch."""
        return not any(entry.data.get(UNREPEATABLE) for entry in since_last_restart(self._all[:position]))

    async def fork(self, turn: int, count: int) -> list[str]:
        """Starts branches that share everything before model call `turn` and sample it anew; returns their episodes.

        A repeat returns the same ones. Empty where no member of the group waits, before the run's own origin, and if
        the tools' states at that place cannot be restored. Raises `LeaseLost`, `QueueUnavailable`.
        """
        if self._branches:
            raise AgentError("fork() while branches run concurrently: their order is not the same in a branch")
        async with self._appending:
            if self._unsure:
                await self._look()
            turns, origin = self.turns, self.origin
            if not 0 <= turn <= len(turns):
                raise AgentError(f"fork() at model call {turn}: the episode has {len(turns)}")
            place = turns[turn].position if turn < len(turns) else len(self._all)
            if not self._is_restorable(place) or (origin is not None and turn <= origin.turn):
                return []
            for _ in range(MISMATCHES_ALLOWED):
                try:
                    await self._restore()
                    return await self._queue.fork(self._lease, turn, self._all[:place], count)
                except JournalMismatch as mismatch:
                    await self._follow(mismatch)
        raise QueueError(f"{self._lease.episode_id}: its journal changed {MISMATCHES_ALLOWED} times during one fork")

    @contextmanager
    def branching(self) -> Iterator[None]:
        """While branches run concurrently, one may ask before another has taken its entries."""
        self._branches += 1
        try:
            yield
        finally:
            self._branches -= 1

    def check_followed(self) -> None:
        """Called at the loop's end. Raises `EpisodeRestart` if branches left entries: the replay diverged."""
        if self._strayed and self._remaining:
            raise EpisodeRestart(f"the replay diverged and left {len(self._remaining)} journal entries")

    def hand_over(self, keys: Collection[str]) -> tuple[JournalEntry, ...]:
        """Removes and returns the entries whose data has one of `keys`; another reader replays them."""
        theirs = [entry for entry in self._remaining if not entry.data.keys().isdisjoint(keys)]
        self._remaining = [entry for entry in self._remaining if entry.data.keys().isdisjoint(keys)]
        self.replayed.sampled += sum(entry.kind is JournalKind.SAMPLED for entry in theirs)
        return tuple(theirs)

    async def append(self, entry: JournalEntry) -> None:
        """Appends durably. Raises `LeaseLost`, `QueueUnavailable`.

        Entries that the queue has lost with its machine are appended again before it: after a hole a replay would
        answer one call with the result of another.
        """
        async with self._appending:
            if self._unsure:
                await self._look()
            try:
                await self._put(entry)
            except BaseException:
                self._unsure = True
                raise

    async def _put(self, entry: JournalEntry) -> None:
        for _ in range(MISMATCHES_ALLOWED):
            try:
                await self._restore()
                await self._queue.journal(self._lease, entry, self._durable)
            except JournalMismatch as mismatch:
                await self._follow(mismatch)
            else:
                self._all.append(entry)
                self._durable += 1
                return
        raise QueueError(f"{self._lease.episode_id}: its journal changed {MISMATCHES_ALLOWED} times during one append")

    async def _restore(self) -> None:
        """Appends entries that the queue has lost."""
        while self._durable < len(self._all):
            await self._queue.journal(self._lease, self._all[self._durable], self._durable)
            self._durable += 1

    async def _follow(self, mismatch: JournalMismatch) -> None:
        if mismatch.entries < self._durable:
            self._durable = mismatch.entries
        else:
            await self._look()

    async def _look(self) -> None:
        """Reads entries that others appended, or an append of this journal that got no answer."""
        entries = (await self._queue.adopt(self._lease.episode_id, self._lease.fence)).journal
        self._all[self._durable : len(entries)] = entries[self._durable :]
        self._durable, self._unsure = len(entries), False

    async def append_naming(self, entry: JournalEntry) -> None:
        """Appends, and adds the run's name if no entry has recorded it yet."""
        if not self._life_is_durable:
            entry = replace(entry, data={**entry.data, LIFE: self._life})
        await self.append(entry)
        self._life_is_durable = True

    async def life(self) -> str:
        """The unique name of this run of the episode, the same for each owner; durable."""
        if not self._life_is_durable:
            await self.append_naming(JournalEntry(kind=JournalKind.TOOLS))
        return self._life

    async def keep_rewards(self, rewards: Mapping[str, float]) -> None:
        """Records tool rewards; called before the tools' states are released."""
        self.tool_rewards = rewards
        await self.append(JournalEntry(kind=JournalKind.TOOLS, data={REWARDS: dict(rewards)}))

    async def keep_score(self, score: RecordedScore) -> None:
        """Records the reward; called before the episode is completed."""
        self.score = score
        await self.append(JournalEntry(kind=JournalKind.TOOLS, data={SCORE: asdict(score)}))

    async def prove(self, reward: str) -> None:
        """Records for the whole run that a reward of this name came."""
        await self._queue.prove_reward(reward)

    async def is_proven(self, reward: str) -> bool:
        """Returns True if a reward of this name came in the run."""
        return await self._queue.is_reward_proven(reward)

    async def restart(self, cause: str) -> None:
        """Abandons the run; durable, so that a later owner does not replay it."""
        self._remaining, self.sessions, self.tool_rewards, self.score = [], {}, None, None
        self.replayed.restarts += 1
        self._life, self._life_is_durable = secrets.token_hex(8), False
        await self.append_naming(JournalEntry(kind=JournalKind.TOOLS, data={RESTART: cause}))


def since_last_restart(entries: Sequence[JournalEntry]) -> list[JournalEntry]:
    """Entries of the current run of the episode."""
    marks = [index for index, entry in enumerate(entries) if RESTART in entry.data]
    return list(entries[marks[-1] + 1 :] if marks else entries)


def _is_note(entry: JournalEntry) -> bool:
    return bool(entry.data) and entry.data.keys() <= NOTES


def _readable(lease: Lease) -> list[JournalEntry]:
    """Entries as this episode reads them: those of a parent without what names its run, its boxes and its rewards."""
    shared = 0 if lease.origin is None else lease.origin.entries
    parents = NOTES | {SESSIONS}
    inherited = [
        replace(entry, data={key: value for key, value in entry.data.items() if key not in parents})
        for entry in lease.journal[:shared]
        if not _is_note(entry)
    ]
    return [*inherited, *lease.journal[shared:]]


def _last(entries: Sequence[JournalEntry], key: str) -> Any:
    return next((entry.data[key] for entry in reversed(entries) if key in entry.data), None)
