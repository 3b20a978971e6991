"""A server's load between two heartbeats, as far as one client knows it."""

from __future__ import annotations

import math
from dataclasses import dataclass

ON_ITS_WAY_S = 0.05
"""What was sent so shortly before a heartbeat may not have reached the server by then."""


@dataclass(eq=False, slots=True)
class Sent:
    """One request of this client that a server is answering."""

    url: str
    tokens: int
    """Prompt and what is expected of the answer."""
    at: float
    comes_back: bool = True
    """It is of an episode that sticks to its server: its next turn is on its way there when this one is over."""
    over_at: float | None = None
    """None: not answered yet."""


class Since:
    """What one heartbeat cannot know: what this client sent after it, and what of the rest is over by now.

    However old the heartbeat is: a busy machine's comes late, and its tokens would else keep new episodes from a
    server that has long been idle. What was sent counts answered or not where it comes back: the first turns of many
    episodes, shortly answered, would else all follow one heartbeat.
    """

    def __init__(self) -> None:
        self.sent_tokens = 0
        self.over_tokens = 0
        self._at = -math.inf
        self._kept: list[Sent] = []
        """Not over yet, or over after the heartbeat."""

    def opened(self, sent: Sent) -> None:
        self._kept.append(sent)
        self.sent_tokens += sent.tokens

    def closed(self, sent: Sent, now: float) -> None:
        sent.over_at = now
        if self._told(sent):
            self.over_tokens += sent.tokens
        elif not sent.comes_back:
            self.sent_tokens -= sent.tokens

    def heard(self, at: float) -> None:
        """The newest heartbeat is from `at`, or from later where one was heard before."""
        self._at = max(self._at, at)
        self._kept = [sent for sent in self._kept if sent.over_at is None or sent.over_at > self._at]
        told = [sent for sent in self._kept if self._told(sent)]
        self.over_tokens = sum(sent.tokens for sent in told if sent.over_at is not None)
        since = [sent for sent in self._kept if not self._told(sent)]
        self.sent_tokens = sum(sent.tokens for sent in since if sent.over_at is None or sent.comes_back)

    def _told(self, sent: Sent) -> bool:
        """What does not come back is rather taken for told: counted twice, it would outweigh many new episodes."""
        return sent.at < self._at - (ON_ITS_WAY_S if sent.comes_back else 0.0)
