"""What further answers may use of an episode's budget, with what is being sampled now taken off."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.agent_loops import TRUNCATED_LENGTH, TRUNCATED_TURNS, Budget
from penstock.transfer_queue import Outcome


@dataclass(frozen=True, slots=True)
class Share:
    """Taken by one call until it has ended."""

    rooms: tuple[int, ...]
    """Most tokens of each answer."""
    tokens: int
    """These together, and the ids that are fed before them."""


class Room:
    """Shares of calls that run side by side; together they never take more than is left."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._turns = 0
        self._tokens = 0

    def take(self, answers: int, wanted: int, fed: int) -> Share | Outcome:
        """Room for so many answers of `wanted` tokens at most, behind `fed` new ids; or how the episode is over."""
        if self._budget.turns_left - self._turns < answers:
            return TRUNCATED_TURNS
        left = self._budget.tokens_left - self._tokens - fed
        rooms = []
        for _ in range(answers):
            rooms.append(min(wanted, left))
            left -= rooms[-1]
        if rooms[-1] < 1:
            return TRUNCATED_LENGTH
        self._turns += answers
        self._tokens += fed + sum(rooms)
        return Share(tuple(rooms), fed + sum(rooms))

    def give_back(self, share: Share) -> None:
        """The call has ended; what it really used is in the budget by now."""
        self._turns -= len(share.rooms)
        self._tokens -= share.tokens
