"""The sessions of one rollout server: leased, found by handle, kept alive, failed, forgotten.

task     runs                does
keep     every TTL / 3       renews leases; drops lost ones; fails episodes that are idle or over their deadline
open     per request         polls the queue until it gives an episode or the client's wait ends
answers  per request         see `session.py`; they continue after their client has disconnected

A server that stops (drain or kill -9) fails nothing: leases stay until their TTL, and the first server that gets a
request with the handle adopts the episode from its journal.

A handle is the URL-safe base64 of ``FENCE EPISODE_ID``. It names one lease, and is invalid once another one is given.
The run's token opens all routes; an episode's key, derived from it, opens that episode's ``/v1/`` alone: an agent that
holds it can sample, but not set its reward or end its episode.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.agent_loops import EpisodeJournal, TokenMismatch
from penstock.common import Backoff, bearer_headers, bearer_token, cancel_and_wait, header, same_token
from penstock.gateway.context import GatewayContext
from penstock.gateway.errors import PREFIX, GatewayError, Gone, NoEpisode, NotNow
from penstock.gateway.finish import FinishResult, fail, finish, finished_earlier
from penstock.gateway.session import GatewaySession
from penstock.transfer_queue import Lease, LeaseLost, Outcome, OutcomeKind, QueueError

MAX_OPEN = 4096
"""Episodes held at once by one rollout server."""
POLL = Backoff(0.05, 0.5, factor=1.5)
"""Between polls of a queue that gives no episode."""
log = logging.getLogger(__name__)


class SessionManager:
    """`start` once, `close` last. One event loop."""

    def __init__(self, context: GatewayContext, lease_ttl_s: float) -> None:
        self.context = context
        self._ttl_s = lease_ttl_s
        self._open: dict[str, GatewaySession] = {}
        self._ended: OrderedDict[str, FinishResult | str] = OrderedDict()
        """Handle → its result, or why it is gone."""
        self._doors: dict[str, asyncio.Lock] = {}
        """Locks by handle; held while an episode is adopted or finished."""
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(), name="recorded episodes")
            self._keeper.add_done_callback(log_keeper_failure)

    async def close(self) -> None:
        """Cancels answers in progress; leases stay as they are."""
        if self._keeper is not None:
            await cancel_and_wait([self._keeper])
        for episode in self._open.values():
            episode.end("the rollout server stops; another one continues the episode")
        await asyncio.gather(*(episode.in_flight.ended() for episode in self._open.values()))

    @property
    def count(self) -> int:
        return len(self._open)

    # opening -------------------------------------------------------------------------------------------------------
    async def open(self, wait_s: float, gone: Callable[[], Awaitable[bool]] | None = None) -> GatewaySession:
        """Leases the next episode of the run. Raises `NotNow`, with the queue's cause, where none is given in time.

        Args:
            gone: whether the client has disconnected; then nothing is leased.
        """
        deadline, pauses = time.monotonic() + wait_s, POLL.pauses()
        while True:
            if len(self._open) >= MAX_OPEN:
                raise NotNow(f"this server holds {MAX_OPEN} episodes already")
            if self.context.draining():
                raise NotNow("this server is draining; ask another one")
            if gone is not None and await gone():
                raise NotNow("the client has disconnected")
            if (lease := await next_lease(self.context)) is not None:
                break
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise NotNow(await why_none(self.context))
            await pauses.sleep(left_s)
        episode = GatewaySession(self.context, lease, handle_of(lease.episode_id, lease.fence))
        self._open[episode.handle] = episode
        return episode

    # finding -------------------------------------------------------------------------------------------------------
    async def find(self, handle: str) -> GatewaySession:
        """The session of a handle, adopted from the journal if it is unknown here.
        Raises `NoEpisode`, `Gone`, `NotNow`.
        """
        async with self._door(handle):
            ended = self._ended.get(handle)
            if ended is not None:
                raise Gone(ended if isinstance(ended, str) else f"the episode is finished: {ended.outcome}")
            return self._open.get(handle) or await self._adopt(handle)

    async def _adopt(self, handle: str) -> GatewaySession:
        try:
            episode_id, fence = lease_of(handle)
            lease = await self.context.queue.adopt(episode_id, fence)
        except BadHandle as error:
            raise NoEpisode(str(error)) from error
        except LeaseLost as error:
            raise Gone(f"the episode has ended, or it was leased anew: {error}") from error
        except QueueError as error:
            raise NotNow(f"the queue: {error}") from error
        try:
            episode = GatewaySession(self.context, lease, handle)
        except TokenMismatch as error:
            self.context.mismatches.seen += 1
            with suppress(QueueError):  # the lease expires
                await self.context.queue.fail(lease, Outcome(OutcomeKind.INFRA_ERROR, error.reason, error.component))
            raise Gone(str(error)) from error
        self._open[handle] = episode
        log.info("episode %s taken over with %d turns", lease.episode_id, len(episode.history.turns))
        return episode

    def _door(self, handle: str) -> asyncio.Lock:
        if len(self._doors) > MAX_OPEN:
            self._doors = {name: lock for name, lock in self._doors.items() if lock.locked() or name in self._open}
        return self._doors.setdefault(handle, asyncio.Lock())

    # ending --------------------------------------------------------------------------------------------------------
    async def finish(self, handle: str, outcome: Outcome | None) -> FinishResult:
        """Repeated calls return the first result. Raises as `finish.finish` does."""
        try:
            episode = await self.find(handle)
            async with self._door(handle):
                if not isinstance(self._ended.get(handle), FinishResult):
                    self._forget(handle, await finish(episode, outcome))
        except Gone:
            known = self._ended.get(handle)
            if not isinstance(known, FinishResult):  # it may have been finished before a restart of this server
                try:
                    earlier = await finished_earlier(lease_of(handle)[0], handle, self.context.queue)
                except QueueError as error:
                    raise NotNow(f"the queue: {error}") from error
                if earlier is None:
                    raise Gone(known or "the episode has ended, or it was leased anew") from None
                self._forget(handle, earlier)
        ending = self._ended[handle]
        assert isinstance(ending, FinishResult)
        return ending

    def _forget(self, handle: str, ending: FinishResult | str) -> None:
        self._open.pop(handle, None)
        self._ended[handle] = ending
        # Results stay, so that a repeated /finish returns the first one and later requests get the cause.
        while len(self._ended) > 4096:
            self._ended.popitem(last=False)

    # keeping -------------------------------------------------------------------------------------------------------
    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            try:
                await self._renew()
            except QueueError as error:
                log.warning("leases not renewed: %s", error)
            for episode in list(self._open.values()):
                if not self._door(episode.handle).locked():  # not while it is adopted or finished
                    await self._look_at(episode)

    async def _renew(self) -> None:
        episodes = {episode.lease.episode_id: episode for episode in self._open.values()}
        lost = await self.context.queue.renew([episode.lease for episode in episodes.values()]) if episodes else []
        for episode_id in lost:
            episodes[episode_id].end("the lease is lost: the episode has ended elsewhere, or it was leased anew")

    async def _look_at(self, episode: GatewaySession) -> None:
        """Forgets a session that is gone; fails one that must end, unless another server serves it by now."""
        if episode.gone is not None and episode.broken is None:
            self._forget(episode.handle, episode.gone)
            return
        cause = episode.broken or self._overdue(episode)
        if cause is None:
            return
        try:
            known = len(episode.history.turns)
            if episode.broken is None:
                await episode.refresh()
            if len(episode.history.turns) > known:
                self._open.pop(episode.handle)
                return
            await fail(episode, cause)
            log.warning("episode %s: %s: %s", episode.lease.episode_id, cause.component, cause.reason)
        except NotNow:
            return
        except GatewayError as error:
            log.warning("episode %s is gone: %s", episode.lease.episode_id, error)
        self._forget(episode.handle, str(episode.gone))

    def _overdue(self, episode: GatewaySession) -> Outcome | None:
        now, config = time.monotonic(), self.context.config.of_source(episode.lease.task.data_source)
        silent_s, reason = now - episode.active_at, ""
        if not episode.in_flight and silent_s > config.capture.idle_s:
            reason = f"silent for {silent_s:.0f} s"
        elif now - episode.opened_at > config.episode_deadline_s:
            reason = f"not finished within {config.episode_deadline_s:g} s"
        return Outcome(OutcomeKind.INFRA_ERROR, reason, "agent") if reason else None


def log_keeper_failure(keeper: asyncio.Task[None]) -> None:
    if not keeper.cancelled() and (error := keeper.exception()) is not None:
        log.critical("leases of recorded episodes are no longer renewed", exc_info=error)


async def next_lease(context: GatewayContext) -> Lease | None:
    """A lease with an empty journal: the entries of an earlier agent are discarded. Raises `NotNow`."""
    try:
        version = await context.client.best_version()
        leases = [] if version is None else await context.queue.lease_episodes(context.worker, 1, version)
        if leases and leases[0].journal:
            await EpisodeJournal(context.queue, leases[0]).restart("leased to another agent")
            return await context.queue.adopt(leases[0].episode_id, leases[0].fence)
    except LeaseLost:
        return None
    except QueueError as error:
        raise NotNow(f"the queue: {error}") from error
    return leases[0] if leases else None


async def why_none(context: GatewayContext) -> str:
    """Why `next_lease` returned nothing, for error messages."""
    try:
        if await context.client.best_version() is None:
            return "no rollout server takes requests now"
        status = await context.queue.status()
    except QueueError as error:
        return f"the queue: {error}"
    groups, episodes = status.groups, status.episodes
    if not groups.get("queued") and not episodes.get("queued"):
        return f"no episode is queued; {episodes.get('leased', 0)} are being run"
    return (
        f"none of {groups.get('queued', 0)} queued groups is admitted now: version {status.version}, "
        f"step {status.step}, {groups.get('admitted', 0)} groups running, {groups.get('ready', 0)} ready; "
        "they wait for the trainer"
    )


class BadHandle(Exception):
    """The text is not a handle."""


def handle_of(episode_id: str, fence: int) -> str:
    return base64.urlsafe_b64encode(f"{fence} {episode_id}".encode()).rstrip(b"=").decode()


def lease_of(handle: str) -> tuple[str, int]:
    """(episode id, fence). Raises `BadHandle`."""
    try:
        text = base64.b64decode(handle + "=" * (-len(handle) % 4), altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError) as error:
        raise BadHandle(f"{handle[:80]!r} is not a handle of an episode") from error
    fence, _, episode_id = text.partition(" ")
    if not (fence.isdecimal() and len(fence) <= 18 and episode_id) or handle_of(episode_id, int(fence)) != handle:
        raise BadHandle(f"{handle[:80]!r} is not a handle of an episode")
    return episode_id, int(fence)


def episode_key(token: str, handle: str) -> str:
    """The key of one episode, its clients' `api_key`."""
    return hmac.new(token.encode(), b"episode:" + handle.encode(), hashlib.sha256).hexdigest()


def opens(token: str, path: str, token_sent: str) -> bool:
    """Return True if `token_sent` is the key of the episode whose ``/v1/`` holds `path`; compared in constant time."""
    if not path.startswith(PREFIX):
        return False
    handle, _, route = path[len(PREFIX) :].partition("/")
    return bool(handle) and route.startswith("v1/") and same_token(token_sent, episode_key(token, handle))


class ApiKeyHeader:
    """ASGI layer: a key in ``x-api-key`` of a request for episodes is a bearer token, if there is no other token."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = header(scope, b"x-api-key")  # where Anthropic's clients put it
        if key and not bearer_token(header(scope, b"authorization")):
            (sent,) = bearer_headers(key.decode("utf-8", "surrogateescape")).values()
            others = [one for one in scope["headers"] if one[0] != b"authorization"]
            authorization = (b"authorization", sent.encode("utf-8", "surrogateescape"))
            scope = {**scope, "headers": [*others, authorization]}
        await self.app(scope, receive, send)
