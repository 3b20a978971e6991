"""Which server an answer is asked from: the registry, what this client knows of it, and nothing in between.

An episode stays with the server that holds its KV. A new one goes home where the client has one, else to the less
loaded of two servers drawn at random: many clients that read the same registry would all choose the one least loaded.
A server that fails rests (`breaker.py`), one that is full is left alone for as long as it asked. No process routes: 1
and 64 servers are the same code.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from typing import Protocol

from penstock.rollout_server.breaker import Breaker
from penstock.rollout_server.since import Sent, Since
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
