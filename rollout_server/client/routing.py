"""Chooses the server of each request from the registry and from what this client knows of each server.

An episode stays with the server that holds its KV cache. A new one goes to this client's home server if it has one.
Otherwise, if it shares a prefix with others, it goes to the first server in the prefix's own order that is not
overloaded: all clients find the same one without a word between them (rendezvous hashing with bounded loads, Mirrokni
et al., arXiv 1608.01350). One without a prefix goes to the less loaded of two servers drawn at random: clients that
read the same registry would all choose the least loaded one. Every client routes for itself; no router
process, and 1 and 64 servers are the same code.
"""

from __future__ import annotations

import math
import random
import time
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from penstock.transfer_queue import QueueError, ServerInfo

CACHE_S = 0.3
TRAIN = "train"
REST_S = 0.25
MAX_REST_S = 4.0
OPEN_AFTER = 3
BOUNDED_LOAD = 1.25
"""A server above this multiple of the mean load gets no new episode for the sake of its prefix. Less would break groups
up for differences that two choices leave too; more makes a step wait for a server that popular prefixes have filled."""
NOT_LOADED = 4
"""With fewer requests of this size a server is never overloaded: so few decode about as fast as one."""


class Registry(Protocol):
    """The part of the queue that a client uses."""

    async def servers(self) -> list[ServerInfo]: ...


class Router:
    """Picks servers and records their results."""

    def __init__(self, registry: Registry, home: str | None = None, seed: int | None = None) -> None:
        """Args:
        home: URL of the server that gets new episodes while it is available.
        """
        self._registry, self._home = registry, home
        self._random = random.Random(seed)
        self._servers: Sequence[ServerInfo] = ()
        self._read_at = -CACHE_S
        self._sticky: OrderedDict[str, str] = OrderedDict()
        self._states: defaultdict[str, _ServerState] = defaultdict(_ServerState)

    async def servers(self) -> Sequence[ServerInfo]:
        """The registry, at most `CACHE_S` old; the last one read where the queue does not answer.

        Raises `QueueError` where none was read before.
        """
        if time.monotonic() - self._read_at > CACHE_S:
            # Set before the call, so that concurrent callers take the cached registry instead of reading it as well.
            self._read_at = asked_at = time.monotonic()
            try:
                self._servers = await self._registry.servers()
            except QueueError:
                if not self._servers:
                    self._read_at = -CACHE_S
                    raise
                for state in self._states.values():
                    # While the queue does not answer, requests that ended 10 s ago are taken off the last
                    # heartbeat's load.
                    state.load.heartbeat(asked_at - 10.0)
                return self._servers
            for server in self._servers:
                self._states[server.url].load.heartbeat(asked_at - server.age_s)
            live = {server.url for server in self._servers}
            for url in [url for url, state in self._states.items() if url not in live and not state.pending]:
                del self._states[url]
        return self._servers

    async def pick(
        self,
        episode_id: str,
        min_version: int,
        avoid: Collection[str] = (),
        split: str = TRAIN,
        *,
        prefix: str = "",
        tokens: int = 1,
    ) -> ServerInfo | None:
        """The server for this episode; None where none accepts requests at `min_version` or newer.

        URLs in `avoid` are picked only if there is no other. A server for evaluations, if there is one, gets
        every split but ``train`` and nothing else, also while it does not accept requests.

        Args:
            prefix: names what this request shares with others at its start; empty: nothing.
            tokens: of this request, prompt and expected answer.
        """
        servers, now = _of_split(await self.servers(), split), time.monotonic()
        able = {s.url: s for s in servers if s.accepting and s.version >= min_version and self._allows(s.url, now)}
        able = {url: server for url, server in able.items() if url not in avoid} or able
        if not able:
            return None
        before = able.get(self._sticky.get(episode_id, ""))
        chosen = before or able.get(self._home or "") or self._for_new(list(able.values()), prefix, tokens)
        self.stick(episode_id, chosen.url)
        return chosen

    def asleep(self, split: str = TRAIN) -> bool:
        """Returns True if all servers of the last registry wait for the trainer to hand their devices back."""
        servers = _of_split(self._servers, split)
        return bool(servers) and all(server.asleep for server in servers)

    def _allows(self, url: str, now: float) -> bool:
        state = self._states.get(url)
        return state is None or (now >= state.full_until and state.breaker.allows(now))

    def _for_new(self, able: list[ServerInfo], prefix: str, tokens: int) -> ServerInfo:
        """The first in the order of `prefix` whose load before this request is at most `BOUNDED_LOAD` × the mean with
        it, or `NOT_LOADED` such requests. The least loaded server always is. Afterwards it has one request more."""
        if not prefix:
            return min(self._random.sample(able, min(2, len(able))), key=self._load)
        loads = {server.url: self._load(server)[0] for server in able}
        bound = max(BOUNDED_LOAD * (sum(loads.values()) + tokens) / len(able), (NOT_LOADED - 1) * tokens)
        return max((one for one in able if loads[one.url] <= bound), key=lambda one: _weight(prefix, one.server_id))

    def _load(self, server: ServerInfo) -> tuple[int, int]:
        """(tokens, requests) in flight: its heartbeat, corrected by this client's own requests."""
        state = self._states[server.url]
        return state.load.tokens(server.in_flight_tokens), server.in_flight + len(state.pending)

    def stick(self, episode_id: str, url: str) -> None:
        """Records that this server holds the episode's KV cache."""
        if not episode_id:
            return
        self._sticky[episode_id] = url
        self._sticky.move_to_end(episode_id)
        if len(self._sticky) > 20_000:
            self._sticky.popitem(last=False)

    # results: `begin` first, `end` last ----------------------------------------------------------------------------
    def begin(self, url: str, tokens: int = 1, *, sticky: bool = True) -> PendingRequest:
        """Records a request to `url`; `sticky`: see `PendingRequest`.

        There must be no await between `pick` and this: a half-open server gets one request only.
        """
        pending = PendingRequest(url, tokens, time.monotonic(), sticky)
        state = self._states[url]
        state.pending.add(pending)
        state.load.begin(pending)
        state.breaker.begin(pending)
        return pending

    def first_tokens(self, pending: PendingRequest) -> None:
        """The server has answered with tokens."""
        self._states[pending.url].breaker.first_tokens(pending)

    def succeeded(self, pending: PendingRequest) -> None:
        """The server has sent a whole answer."""
        self._states[pending.url].breaker.succeeded()

    def failed(self, pending: PendingRequest, cause: str, *, gone: bool) -> None:
        """The answer broke off; `gone`: the server is unreachable, or does not serve."""
        self._states[pending.url].breaker.failed(time.monotonic(), pending, cause, gone=gone)
        self._read_at = -CACHE_S

    def full(self, pending: PendingRequest, retry_after_s: float) -> None:
        """The server's queue is full; this is not a failure."""
        self._states[pending.url].full_until = time.monotonic() + retry_after_s

    def end(self, pending: PendingRequest) -> None:
        """The request has ended, with whatever result."""
        state = self._states[pending.url]
        state.pending.discard(pending)
        state.load.end(pending, time.monotonic())
        state.breaker.end(pending)

    def describe(self) -> str:
        """The known servers and what keeps each from being asked, for error messages."""
        lines, now = [], time.monotonic()
        for server in self._servers:
            state = self._states[server.url]
            if not state.breaker.allows(now):
                condition = f"rests after: {state.breaker.cause}"
            elif now < state.full_until:
                condition = "has a long queue"
            elif server.asleep:
                condition = "is asleep in the trainer's turn"
            else:
                condition = "accepts" if server.accepting else "does not accept"
            lines.append(f"{server.server_id} v{server.version} {condition}")
        return ", ".join(lines)


def _of_split(servers: Sequence[ServerInfo], split: str) -> list[ServerInfo]:
    evaluates = split != TRAIN and any(server.evaluates for server in servers)
    return [server for server in servers if server.evaluates == evaluates]


def _weight(prefix: str, server_id: str) -> int:
    """The server with the greatest one has the prefix: if it leaves, no other prefix moves."""
    return xxhash.xxh3_64_intdigest(f"{prefix}\0{server_id}".encode())


class _ServerState:
    """State of one URL as this client sees it; a restarted server has a new URL."""

    def __init__(self) -> None:
        self.breaker = CircuitBreaker()
        self.load = InFlightEstimate()
        self.full_until = 0.0
        self.pending: set[PendingRequest] = set()


class CircuitBreaker:
    """One server's health as one client sees it; starts closed.

        closed ──► open: no requests for 0.25 s, 0.5 s … 4 s, doubled each time it opens again
          ▲ ▲         │ then half-open: ONE trial request
          │ └─────────┤ the trial got its first tokens
          │           └─► the trial failed: open again
          └ a whole answer clears all failures

    An unreachable server opens it at once; answers that broke off do so after `OPEN_AFTER` in a row, because one
    request may fail because of itself. `now` is monotonic, in seconds.

    Calls per request: `begin`, then `first_tokens` and `succeeded`, or `failed`, then `end`.
    """

    def __init__(self) -> None:
        self.cause = ""
        self._failures = 0
        self._rest_s = 0.0
        """The last rest; 0 while no failure is remembered."""
        self._open_until: float | None = None
        """None: closed."""
        self._trial: object | None = None
        """The one request to a half-open server."""

    def allows(self, now: float) -> bool:
        """Returns True if a request may be sent: closed, or half-open without a trial."""
        return self._open_until is None or (now >= self._open_until and self._trial is None)

    def begin(self, request: object) -> None:
        """`request` is sent; it is the trial where the breaker is half-open."""
        if self._open_until is not None:
            self._trial = request

    def first_tokens(self, request: object) -> None:
        """A trial has succeeded; failures are remembered until a whole answer has come."""
        if self._trial is request:
            self._open_until = self._trial = None

    def succeeded(self) -> None:
        """A whole answer has come."""
        self._failures, self._rest_s, self._open_until, self._trial = 0, 0.0, None, None

    def failed(self, now: float, request: object, cause: str, *, gone: bool) -> None:
        """`gone`: the server could not be reached, or does not serve."""
        if self._open_until is not None and self._trial is not request:
            return  # sent before the breaker opened: its failure says nothing new
        self.cause, self._failures = cause, self._failures + 1
        if gone or self._trial is request or self._failures >= OPEN_AFTER:
            self._rest_s = min(2 * self._rest_s, MAX_REST_S) if self._rest_s else REST_S
            self._open_until, self._failures = now + self._rest_s, 0

    def end(self, request: object) -> None:
        """The request has ended. A trial cancelled without a result makes room for the next one."""
        if self._trial is request:
            self._trial = None


@dataclass(eq=False, slots=True)
class PendingRequest:
    """One request of this client that a server is answering."""

    url: str
    tokens: int
    """Prompt and expected answer."""
    sent_at: float
    sticky: bool = True
    """Part of an episode that stays with its server: its next turn goes there when this one has ended."""
    ended_at: float | None = None
    """None: not answered yet."""


class InFlightEstimate:
    """Tokens in flight at one server: its heartbeat, corrected by this client's requests since.

    Requests that ended after the heartbeat are taken off, however old it is: a busy machine's heartbeat is late, and
    its tokens would keep new episodes from a server that has long been idle. Requests sent after it are added, also
    once answered if they are sticky: otherwise the first turns of many episodes, answered soon, would all go to the
    server of one heartbeat.
    """

    def __init__(self) -> None:
        self._added = 0
        self._removed = 0
        self._heartbeat_at = -math.inf
        self._recent: list[PendingRequest] = []
        """Not ended, or ended after the heartbeat."""

    def tokens(self, reported: int) -> int:
        """Return the tokens in flight now, given `reported` of the newest heartbeat."""
        return max(0, reported - self._removed) + self._added

    def begin(self, request: PendingRequest) -> None:
        """A request was sent."""
        self._recent.append(request)
        self._added += request.tokens

    def end(self, request: PendingRequest, now: float) -> None:
        """A request has ended."""
        request.ended_at = now
        if self._is_reported(request):
            self._removed += request.tokens
        elif not request.sticky:
            self._added -= request.tokens

    def heartbeat(self, at: float) -> None:
        """The newest heartbeat was made at `at`; an older one than the last is ignored."""
        self._heartbeat_at = max(self._heartbeat_at, at)
        self._recent = [one for one in self._recent if one.ended_at is None or one.ended_at > self._heartbeat_at]
        reported = [one for one in self._recent if self._is_reported(one)]
        self._removed = sum(one.tokens for one in reported if one.ended_at is not None)
        since = [one for one in self._recent if not self._is_reported(one)]
        self._added = sum(one.tokens for one in since if one.ended_at is None or one.sticky)

    def _is_reported(self, request: PendingRequest) -> bool:
        """Return True if a heartbeat has reported the request. One without an episode counts as reported: counted
        twice, it outweighs many new episodes.
        """
        # A request sent 50 ms before a heartbeat may have reached the server after it.
        return request.sent_at < self._heartbeat_at - (0.05 if request.sticky else 0.0)
