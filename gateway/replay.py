"""What an agent's second run is told: the answers that its first run was given, each one once."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.gateway.history import Place, Turn

Asked = tuple[tuple[int, int], str]
"""(length and hash of a context, how it was asked)"""


class Replay:
    """Made from what the journal held when the episode was taken over. Empty for an episode that is new."""

    def __init__(self, turns: Iterable[Turn] = ()) -> None:
        self._left: dict[Asked, dict[str, list[Turn]]] = {}
        for turn in turns:
            calls = self._left.setdefault((turn.place.asked, turn.asked), {})
            calls.setdefault(turn.answer_id, []).append(turn)

    def take(self, place: Place, how: str) -> list[Turn]:
        """Choices of the oldest call that asked this and was not told yet; none where it was never asked."""
        calls = self._left.get((place.asked, how))
        if not calls:
            return []
        return calls.pop(next(iter(calls)))

    @property
    def left(self) -> int:
        """Calls that were not asked for again."""
        return sum(len(calls) for calls in self._left.values())
