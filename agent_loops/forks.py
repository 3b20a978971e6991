"""Branches of an episode: other members of its group that share its beginning, token for token.

    root      question ─► answer 1 ─► results ─► answer 2 ─► results ─► answer 3
    branch                                   └─► answer 2' ─► …          fork at model call 1

A branch is leased by any worker and runs its loop from the start; the journal that it shares with its parent answers
what came before the fork, as after a crash. Its tools have states of their own, restored by the calls before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from penstock.agent_loops.config import ForksConfig
from penstock.agent_loops.journal import EpisodeJournal, JournaledTurn
from penstock.transfer_queue import JournalEntry, Lease


class Forks:
    """Forks one episode, where its loop asks for it or, for a root, by `agent.forks.turn` once it has ended."""

    def __init__(self, config: ForksConfig | None, lease: Lease, journal: EpisodeJournal) -> None:
        self._config = config
        self._lease = lease
        self._journal = journal

    async def fork(self, turn: int, count: int | None = None) -> list[str]:
        """See `AgentLoopBase.fork`."""
        if self._config is None:
            return []
        return await self._journal.fork(turn, self._config.branches if count is None else count)

    async def at_end(self) -> list[str]:
        """Forks a root at the turn that `agent.forks.turn` chooses. A repeat chooses the same one."""
        if self._config is None or self._config.turn == "loop" or self._journal.origin is not None:
            return []
        turn = choose_turn(self._config.turn, self._journal.turns, seed=self._lease.episode_id)
        return [] if turn is None else await self.fork(turn)


def choose_turn(policy: str, turns: Sequence[JournaledTurn], seed: str) -> int | None:
    """Returns the index of a turn before which every state can be restored; None if there is none."""
    candidates = [number for number, turn in enumerate(turns) if turn.is_restorable]
    if not candidates:
        return None
    if policy == "random":
        return random.Random(seed).choice(candidates)
    return max(candidates, key=lambda number: mean_entropy(turns[number].entry))


def mean_entropy(entry: JournalEntry) -> float:
    """Returns the estimate of a model call's mean entropy from its own sample: the mean of −logprob over its tokens."""
    assert entry.logprobs is not None
    return -float(entry.logprobs.mean())
