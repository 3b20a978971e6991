"""All recorded episodes of one rollout server: leased, found by handle, kept alive, given up, forgotten.

task     every               does
keep     a third of the TTL  renews leases; drops lost ones; fails episodes that are silent or over their deadline
open     a request           asks the queue until it gives an episode or the client's patience ends
calls    a request           see `episode.py`; they go on when their client goes away

Stopped (drain or kill -9), nothing is given back: leases stay until their TTL, and whichever sidecar is asked for a
handle first takes the episode over from the journal.

The next episode for an agent, or why there is none.

Who may open an episode's paths: the run's token, and for this episode alone a key made from it.

handle = URL-safe base64 of ``FENCE EPISODE_ID``: names one lease, so it stops working when another one is given.
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

from penstock.agent_loops import EpisodeJournal, TokenMismatch
from penstock.gateway.context import CaptureParts
from penstock.gateway.errors import CaptureError, Gone, NoEpisode, NotNow
from penstock.gateway.finish import Ending, fail, finish, finished_before
from penstock.gateway.session import CapturedEpisode
from penstock.transfer_queue import Lease, LeaseLost, Outcome, OutcomeKind, QueueError, Status

MAX_OPEN = 4096
"""Episodes held at once by one rollout server."""
REMEMBERED = 4096
"""Endings, so that /finish answers twice the same and later calls hear why there is nothing."""
PAUSE_S = (0.05, 0.5)
"""First and longest pause between two looks at a queue that has nothing to give."""
log = logging.getLogger(__name__)


class Desk:
    """`start` once, `close` last. One event loop."""

    def __init__(self, parts: CaptureParts, lease_ttl_s: float) -> None:
        self.parts = parts
        self._ttl_s = lease_ttl_s
        self._open: dict[str, CapturedEpisode] = {}
        self._ended: OrderedDict[str, Ending | str] = OrderedDict()
        """Handle → how it was finished, or why it is gone."""
        self._doors: dict[str, asyncio.Lock] = {}
        """One at a time adopts or finishes an episode."""
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(), name="recorded episodes")
            self._keeper.add_done_callback(_say_why)

    async def close(self) -> None:
        """Calls are given up; leases stay as they are."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        for episode in self._open.values():
            episode.end("the rollout server stops; the episode goes on at another one")
        await asyncio.gather(*(episode.in_flight.ended() for episode in self._open.values()))

    @property
    def count(self) -> int:
        return len(self._open)

    # opening -------------------------------------------------------------------------------------------------------
    async def open(self, wait_s: float, gone: Callable[[], Awaitable[bool]] | None = None) -> CapturedEpisode:
        """The next episode of the run. Raises `NotNow` with the queue's cause where none is given in time.

        `gone`: whether who asked has hung up; nothing is leased for nobody then.
        """
        deadline, pause_s = time.monotonic() + wait_s, PAUSE_S[0]
        while (lease := await self._lease_if_wanted(gone)) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise NotNow(await why_none(self.parts))
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, PAUSE_S[1])
        episode = CapturedEpisode(self.parts, lease, handle_of(lease.episode_id, lease.fence))
        self._open[episode.handle] = episode
        return episode

    async def _lease_if_wanted(self, gone: Callable[[], Awaitable[bool]] | None) -> Lease | None:
        if len(self._open) >= MAX_OPEN:
            raise NotNow(f"this server holds {MAX_OPEN} episodes already")
        if self.parts.draining():
            raise NotNow("this server is draining; ask another one")
        if gone is not None and await gone():
            raise NotNow("who asked is gone")
        return await next_lease(self.parts)

    # finding -------------------------------------------------------------------------------------------------------
    async def find(self, handle: str) -> CapturedEpisode:
        """The episode of a handle, taken over from the journal where it is not known here.

        Raises `NoEpisode`, `Gone`, `NotNow`.
        """
        async with self._door(handle):
            ended = self._ended.get(handle)
            if ended is not None:
                raise Gone(ended if isinstance(ended, str) else f"the episode is finished: {ended.outcome}")
            episode = self._open.get(handle)
            return episode if episode is not None else await self._adopt(handle)

    async def _adopt(self, handle: str) -> CapturedEpisode:
        try:
            episode_id, fence = lease_of(handle)
            lease = await self.parts.queue.adopt(episode_id, fence)
        except BadHandle as error:
            raise NoEpisode(str(error)) from error
        except LeaseLost as error:
            raise Gone(f"the episode has ended, or it was leased anew: {error}") from error
        except QueueError as error:
            raise NotNow(f"the queue: {error}") from error
        try:
            episode = CapturedEpisode(self.parts, lease, handle)
        except TokenMismatch as error:
            self.parts.mismatches.seen += 1
            await self._give_back(lease, error)
            raise Gone(str(error)) from error
        self._open[handle] = episode
        log.info("episode %s taken over with %d turns", lease.episode_id, len(episode.history.turns))
        return episode

    async def _give_back(self, lease: Lease, error: TokenMismatch) -> None:
        with suppress(QueueError):  # the lease runs out by itself
            await self.parts.queue.fail(lease, Outcome(OutcomeKind.INFRA_ERROR, error.reason, error.component))

    def _door(self, handle: str) -> asyncio.Lock:
        if len(self._doors) > MAX_OPEN:
            self._doors = {name: lock for name, lock in self._doors.items() if lock.locked() or name in self._open}
        return self._doors.setdefault(handle, asyncio.Lock())

    # ending --------------------------------------------------------------------------------------------------------
    async def finish(self, handle: str, outcome: Outcome | None) -> Ending:
        """Raises as `closing.finish`; the second time it answers what it answered the first time."""
        try:
            episode = await self.find(handle)
            async with self._door(handle):
                if not isinstance(self._ended.get(handle), Ending):
                    self._forget(handle, await finish(episode, outcome))
        except Gone:
            if not isinstance(self._ended.get(handle), Ending):
                self._forget(handle, await self._finished_before(handle))
        ending = self._ended[handle]
        assert isinstance(ending, Ending)
        return ending

    async def _finished_before(self, handle: str) -> Ending:
        """After a restart: the queue knows how it was finished. Raises the `Gone` that it is otherwise."""
        episode_id, _ = lease_of(handle)
        try:
            ending = await finished_before(episode_id, handle, self.parts.queue)
        except QueueError as error:
            raise NotNow(f"the queue: {error}") from error
        if ending is None:
            known = self._ended.get(handle)
            raise Gone(known if isinstance(known, str) else "the episode has ended, or it was leased anew")
        return ending

    def _forget(self, handle: str, ending: Ending | str) -> None:
        self._open.pop(handle, None)
        self._ended[handle] = ending
        while len(self._ended) > REMEMBERED:
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
                if not self._door(episode.handle).locked():  # being adopted or finished
                    await self._look_at(episode)

    async def _renew(self) -> None:
        held = {episode.lease.episode_id: episode for episode in self._open.values()}
        lost = await self.parts.queue.renew([episode.lease for episode in held.values()]) if held else []
        for episode_id in lost:
            held[episode_id].end("the lease is lost: the episode has ended elsewhere, or it was leased anew")

    async def _look_at(self, episode: CapturedEpisode) -> None:
        """Forget what is gone; fail what must end. Another sidecar that serves it by now keeps it."""
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
        except CaptureError as error:
            log.warning("episode %s is gone: %s", episode.lease.episode_id, error)
        self._forget(episode.handle, str(episode.gone))

    def _overdue(self, episode: CapturedEpisode) -> Outcome | None:
        now, config = time.monotonic(), self.parts.config
        silent_s = now - episode.active_at
        if not episode.in_flight and silent_s > config.capture.idle_s:
            return _agent_failure(f"silent for {silent_s:.0f} s")
        if now - episode.opened_at > config.episode_deadline_s:
            return _agent_failure(f"not finished within {config.episode_deadline_s:g} s")
        return None


def _agent_failure(reason: str) -> Outcome:
    return Outcome(OutcomeKind.INFRA_ERROR, reason, "agent")


def _say_why(keeper: asyncio.Task[None]) -> None:
    if not keeper.cancelled() and (error := keeper.exception()) is not None:
        log.critical("leases of recorded episodes are not kept any more", exc_info=error)


async def next_lease(parts: CaptureParts) -> Lease | None:
    """A lease with nothing in its journal that counts: an earlier owner's agent is not this one. Raises `NotNow`."""
    try:
        version = await parts.client.best_version()
        leases = [] if version is None else await parts.queue.lease_episodes(parts.worker, 1, version)
        if leases and leases[0].journal:
            await EpisodeJournal(parts.queue, leases[0]).restart("leased to another agent")
            return await parts.queue.adopt(leases[0].episode_id, leases[0].fence)
    except LeaseLost:
        return None
    except QueueError as error:
        raise NotNow(f"the queue: {error}") from error
    return leases[0] if leases else None


async def why_none(parts: CaptureParts) -> str:
    """For people."""
    try:
        if await parts.client.best_version() is None:
            return "no rollout server takes requests now"
        return _cause(await parts.queue.status())
    except QueueError as error:
        return f"the queue: {error}"


def _cause(status: Status) -> str:
    """Why `lease_episodes` gave nothing."""
    groups, episodes = status.groups, status.episodes
    if not groups.get("queued") and not episodes.get("queued"):
        return f"no episode is queued; {episodes.get('leased', 0)} are being run"
    return (
        f"none of {groups.get('queued', 0)} queued groups is admitted now: version {status.version}, "
        f"step {status.step}, {groups.get('admitted', 0)} groups running, {groups.get('ready', 0)} ready; "
        "they wait for the trainer"
    )


PREFIX = "/episodes/"


class BadHandle(Exception):
    """The path names no episode that there could be."""


def handle_of(episode_id: str, fence: int) -> str:
    return base64.urlsafe_b64encode(f"{fence} {episode_id}".encode()).rstrip(b"=").decode()


def lease_of(handle: str) -> tuple[str, int]:
    """(episode id, fence). Raises `BadHandle`."""
    try:
        text = base64.b64decode(handle + "=" * (-len(handle) % 4), altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError) as error:
        raise BadHandle(f"{handle[:80]!r} is no handle of an episode") from error
    fence, _, episode_id = text.partition(" ")
    if not (fence.isdecimal() and len(fence) <= 18 and episode_id) or handle_of(episode_id, int(fence)) != handle:
        raise BadHandle(f"{handle[:80]!r} is no handle of an episode")
    return episode_id, int(fence)


def episode_key(token: str, handle: str) -> str:
    """The `api_key` of one episode."""
    return hmac.new(token.encode(), b"episode:" + handle.encode(), hashlib.sha256).hexdigest()


def opens(token: str, path: str, given: str) -> bool:
    """Whether `given` is the key of the episode that `path` lies in; compared in constant time."""
    if not path.startswith(PREFIX):
        return False
    handle = path[len(PREFIX) :].partition("/")[0]
    expected = episode_key(token, handle)
    return bool(handle) and hmac.compare_digest(expected.encode(), given.encode("utf-8", "surrogateescape"))
