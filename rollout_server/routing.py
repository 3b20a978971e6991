"""Which server an answer is asked from: the registry, what this client knows of it, and nothing in between.

An episode stays with the server that holds its KV. A new one goes home where the client has one, else to the less
loaded of two servers drawn at random: many clients that read the same registry would all choose the one least loaded.
A server that fails rests (`breaker.py`), one that is full is left alone for as long as it asked. No process routes: 1
and 64 servers are the same code.

One server's circuit breaker, as one client sees it.

    closed ──► open: left alone for 0.25 s, 0.5 s … 4 s, twice as long each time it opens again
      ▲ ▲         │ over: half-open, ONE request may try
      │ └─────────┤ it got its first tokens
      │           └─► it failed: open again
      └ a whole answer forgets all failures

A server that cannot be reached opens it at once; answers that broke off do after `OPEN_AFTER` in a row, because one
request may fail for its own reasons. No clock of its own: `now` is monotonic, in seconds.

A server's load between two heartbeats, as far as one client knows it.
"""

from __future__ import annotations

import math
import random
import time
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.transfer_queue import QueueError, ServerInfo

CACHE_S = 0.3
KEPT_S = 10.0
"""Without a queue, what was over so long ago is nothing that a heartbeat in hand could still tell of."""
STICKY_EPISODES = 20_000
TRAIN = "train"


class Registry(Protocol):
    """The part of the queue that a client uses."""

    async def servers(self) -> list[ServerInfo]: ...


class _Known:
    """What this client knows of one URL. A restarted server is a new one."""

    def __init__(self) -> None:
        self.breaker = Breaker()
        self.full_until = 0.0
        self.sent: set[Sent] = set()
        """Not yet answered."""
        self._since = Since()

    def opened(self, sent: Sent) -> None:
        self.sent.add(sent)
        self._since.opened(sent)

    def closed(self, sent: Sent, now: float) -> None:
        self.sent.discard(sent)
        self._since.closed(sent, now)

    def heard(self, at: float) -> None:
        self._since.heard(at)

    def tokens(self, told: int) -> int:
        """In flight there, where its newest heartbeat told of `told`."""
        return max(0, told - self._since.over_tokens) + self._since.sent_tokens


class Router:
    """Picks servers and remembers how they did."""

    def __init__(self, registry: Registry, home: str | None = None, seed: int | None = None) -> None:
        """`home`: URL of the server that new episodes go to while it is able."""
        self._registry, self._home = registry, home
        self._random = random.Random(seed)
        self._servers: Sequence[ServerInfo] = ()
        self._read_at = -CACHE_S
        self._sticky: OrderedDict[str, str] = OrderedDict()
        self._known: defaultdict[str, _Known] = defaultdict(_Known)

    async def servers(self) -> Sequence[ServerInfo]:
        """The registry, at most `CACHE_S` old; older where the queue does not answer and something is known."""
        if time.monotonic() - self._read_at > CACHE_S:
            # Before the call: others that ask meanwhile take what is known instead of asking too.
            self._read_at = asked_at = time.monotonic()
            try:
                self._servers = await self._registry.servers()
            except QueueError:
                if not self._servers:
                    self._read_at = -CACHE_S
                    raise
                for known in self._known.values():
                    known.heard(asked_at - KEPT_S)
            else:
                self._note(asked_at)
        return self._servers

    def _note(self, asked_at: float) -> None:
        for server in self._servers:
            self._known[server.url].heard(asked_at - server.age_s)
        self._forget_gone()

    def _forget_gone(self) -> None:
        live = {server.url for server in self._servers}
        for url in [url for url, known in self._known.items() if url not in live and not known.sent]:
            del self._known[url]

    async def pick(
        self, episode_id: str, min_version: int, avoid: Collection[str] = (), split: str = TRAIN
    ) -> ServerInfo | None:
        """The server for this episode; None where none accepts requests at `min_version` or newer.

        URLs in `avoid` are picked only where there is no other. A server for evaluations, where there is one, gets all
        that is not of split ``train`` and nothing else, also while it does not accept.
        """
        servers, now = _of_split(await self.servers(), split), time.monotonic()
        able = {s.url: s for s in servers if s.accepting and s.version >= min_version and self._lets_in(s.url, now)}
        able = {url: server for url, server in able.items() if url not in avoid} or able
        if not able:
            return None
        before = able.get(self._sticky.get(episode_id, ""))
        chosen = before or able.get(self._home or "") or self._less_loaded(list(able.values()))
        self.stick(episode_id, chosen.url)
        return chosen

    def _lets_in(self, url: str, now: float) -> bool:
        known = self._known.get(url)
        return known is None or (now >= known.full_until and known.breaker.allows(now))

    def _less_loaded(self, able: list[ServerInfo]) -> ServerInfo:
        two = self._random.sample(able, min(2, len(able)))
        return min(two, key=self._load)

    def _load(self, server: ServerInfo) -> tuple[int, int]:
        """Tokens in flight there, as its heartbeat and what this client knows since have it; then requests."""
        known = self._known[server.url]
        return known.tokens(server.in_flight_tokens), server.in_flight + len(known.sent)

    def stick(self, episode_id: str, url: str) -> None:
        """This server holds the episode's KV from now on."""
        if not episode_id:
            return
        self._sticky[episode_id] = url
        self._sticky.move_to_end(episode_id)
        if len(self._sticky) > STICKY_EPISODES:
            self._sticky.popitem(last=False)

    # how it went: `opened` first, `closed` last ---------------------------------------------------------------------
    def opened(self, url: str, tokens: int = 1, *, comes_back: bool = True) -> Sent:
        """A request goes to `url` now; `comes_back`: see `Sent`. No await between `pick` and this: a half-open server
        gets one request."""
        sent = Sent(url, tokens, time.monotonic(), comes_back)
        known = self._known[url]
        known.opened(sent)
        known.breaker.begin(sent)
        return sent

    def spoke(self, sent: Sent) -> None:
        self._known[sent.url].breaker.spoke(sent)

    def worked(self, sent: Sent) -> None:
        self._known[sent.url].breaker.finished()

    def failed(self, sent: Sent, cause: str, *, gone: bool) -> None:
        """`gone`: it could not be reached, or does not serve."""
        self._known[sent.url].breaker.failed(time.monotonic(), sent, cause, gone=gone)
        self._read_at = -CACHE_S

    def full(self, sent: Sent, retry_after_s: float) -> None:
        """Its queue is long: nothing is wrong with it."""
        self._known[sent.url].full_until = time.monotonic() + retry_after_s

    def closed(self, sent: Sent) -> None:
        known = self._known[sent.url]
        known.closed(sent, time.monotonic())
        known.breaker.end(sent)

    def describe(self) -> str:
        """The servers that are known and what keeps each from being asked, for error messages."""
        return ", ".join(f"{s.server_id} v{s.version} {self._state(s)}" for s in self._servers)

    def _state(self, server: ServerInfo) -> str:
        known, now = self._known[server.url], time.monotonic()
        if not known.breaker.allows(now):
            return f"rests after: {known.breaker.cause}"
        if now < known.full_until:
            return "has a long queue"
        return "accepts" if server.accepting else "does not accept"


def _of_split(servers: Sequence[ServerInfo], split: str) -> list[ServerInfo]:
    evaluates = split != TRAIN and any(server.evaluates for server in servers)
    return [server for server in servers if server.evaluates == evaluates]


REST_S = 0.25
MAX_REST_S = 4.0
OPEN_AFTER = 3


class Breaker:
    """Closed when made. Whoever asks the server calls `begin`, then `spoke` and `finished`, or `failed`, then `end`."""

    def __init__(self) -> None:
        self.cause = ""
        self._failures = 0
        self._rest_s = 0.0
        """How long the last rest was; 0 while no failure is remembered."""
        self._rests_until: float | None = None
        """None: closed."""
        self._trial: object | None = None
        """The one request that tries a half-open server."""

    def allows(self, now: float) -> bool:
        """Whether a request may go there: closed, or half-open with nobody trying."""
        return self._rests_until is None or (now >= self._rests_until and self._trial is None)

    def begin(self, request: object) -> None:
        """`request` goes there; it is the trial where the breaker is half-open."""
        if self._rests_until is not None:
            self._trial = request

    def spoke(self, request: object) -> None:
        """First tokens came: a trial has succeeded, what was remembered stays until a whole answer came."""
        if self._trial is request:
            self._rests_until = self._trial = None

    def finished(self) -> None:
        """A whole answer came."""
        self._failures, self._rest_s, self._rests_until, self._trial = 0, 0.0, None, None

    def failed(self, now: float, request: object, cause: str, *, gone: bool) -> None:
        """`gone`: the server could not be reached or said that it does not serve."""
        if self._rests_until is not None and self._trial is not request:
            return  # sent before it opened: that this fails too is no news
        self.cause, self._failures = cause, self._failures + 1
        if gone or self._trial is request or self._failures >= OPEN_AFTER:
            self._rest_s = min(2 * self._rest_s, MAX_REST_S) if self._rest_s else REST_S
            self._rests_until, self._failures = now + self._rest_s, 0

    def end(self, request: object) -> None:
        """The request is over, however: a trial that was given up without a verdict lets the next one try."""
        if self._trial is request:
            self._trial = None


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
