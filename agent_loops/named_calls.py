"""A tool call by a name of its own: the same in every worker that runs the episode, so that none does it twice.

A worker that dies while a call is out leaves no entry of it in the journal. The next one asks the same again, under
the same name, and a sandbox server that did it already tells what came of it (`sandbox/idempotency.py`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from penstock.tools.parsers import ToolCall


@dataclass(frozen=True, slots=True)
class NamedCall:
    """One call of one turn of one run of an episode."""

    call: ToolCall
    name: str


class CallNames:
    """Gives names to the calls of one run of an episode, turn after turn, replayed turns included.

    Made of what is asked and how often it was, not of the order: branches of an episode may ask in another order.
    """

    def __init__(self) -> None:
        self._asked: Counter[int] = Counter()

    def of_turn(self, life: str, asked: int, calls: Sequence[ToolCall]) -> list[NamedCall]:
        """`life`: the run's own name (`EpisodeJournal.life`); `asked`: `hash_of(calls)`."""
        turn, self._asked[asked] = self._asked[asked], self._asked[asked] + 1
        return [NamedCall(call, f"{life}/{asked:016x}.{turn}.{index}") for index, call in enumerate(calls)]


def hash_of(calls: Sequence[ToolCall]) -> int:
    """What a turn asks, as the journal knows it."""
    plain = [[call.name, call.arguments, call.error] for call in calls]
    return xxhash.xxh3_64_intdigest(json.dumps(plain, sort_keys=True, default=repr).encode())
