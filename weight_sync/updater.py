"""The weights that one server's engine has loaded, kept up to date. One `WeightUpdater` over all engine restarts.

A server is a *straggler* if it lacks newer weights that another server has: its loads are refused again and again, or
it has been behind for long. Weights that no server can load are the trainer's fault: the old ones stay then.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from pydantic import BaseModel

from penstock.transfer_queue import Announcement, AnnouncementMark, QueueError, ServerInfo, WeightUpdate
from penstock.weight_sync.fetch import Fetch
from penstock.weight_sync.manifest import Manifest, WeightsRefused, WeightsUnreachable

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge

logger = logging.getLogger(__name__)
RETRY_FETCH_S = 1.0
STRAGGLER_S = 60.0
"""A server so long, and two versions, behind without any load that succeeded should start over."""
LoadOutcome = Literal["loaded", "refused", "unreachable"]
T = TypeVar("T")


class LoadReport(BaseModel):
    """The cost of one weight swap, as the engine measured it."""

    version: int
    fetch_s: float
    """Reading and verifying the bytes, while decoding continues."""
    pause_s: float
    """Seconds from the end of decoding to its continuation."""
    load_s: float
    """Copying into the model, part of the pause."""
    in_flight: int
    """Requests that were paused and continued."""


class WeightsLoad(BaseModel):
    """One attempt to load announced weights."""

    version: int
    at_unix_s: float
    outcome: LoadOutcome
    cause: str = ""
    report: LoadReport | None = None


class WeightsStatus(BaseModel):
    """Body of GET and POST /weights."""

    version: int
    """Loaded and sampled from."""
    newest: int | None
    """Announced, as last read from the queue."""
    behind_versions: int
    behind_s: float
    """Seconds for which newer weights have been known and not loaded."""
    last: LoadReport | None
    """The last load that succeeded."""
    refused: int | None
    cause: str
    history: list[WeightsLoad]
    """The newest 20 attempts, oldest first."""


class WeightLoader(Protocol):
    """The part of an engine that the updater uses."""

    async def load_weights(self, manifest: Manifest) -> LoadReport: ...


class VersionQueue(Protocol):
    """The part of the transfer queue that the updater uses."""

    async def latest_version(self) -> Announcement | None: ...
    async def latest_mark(self) -> AnnouncementMark | None: ...
    async def report_update(self, update: WeightUpdate) -> None: ...
    async def servers(self) -> list[ServerInfo]: ...


class QueueConnection(Protocol):
    """``await connection.ask(connection.queue.latest_version())``."""

    @property
    def queue(self) -> VersionQueue: ...

    async def ask(self, call: Awaitable[T]) -> T:
        """The result of `call`, with a deadline. Raises `QueueError`."""


class UpdateMetrics(Protocol):
    """The counters of the updater."""

    lag: Gauge
    refused: Counter

    def updated(self, report: LoadReport) -> None: ...


class UpdateGate(Protocol):
    """Returns True if the weights may be changed now; called right before the change."""

    async def __call__(self) -> bool: ...


def _parsed(newest: Announcement) -> Manifest:
    """Raises `WeightsRefused`, also for a manifest of another version: it would never be held, and loaded for ever."""
    manifest = Manifest.parse(newest.manifest)
    if manifest.version != newest.version:
        raise WeightsRefused(f"the manifest is of version {manifest.version}")
    return manifest


class WeightUpdater:
    """`begin` with each new engine, then `pull` again and again. Not for several callers at once."""

    def __init__(
        self,
        name: str,
        connection: QueueConnection,
        fetch: Fetch,
        metrics: UpdateMetrics,
        may_move: UpdateGate | None = None,
    ) -> None:
        self.version = 0
        self.cause = ""
        """Why the newest weights are not held; empty if they are."""
        self.newest: Announcement | None = None
        self.refused: Announcement | None = None
        self.history: deque[WeightsLoad] = deque(maxlen=20)
        self.last: LoadReport | None = None
        self.pulls = 0
        """Times that the queue was asked and the answer dealt with."""
        self._name, self._connection, self._fetch, self._metrics = name, connection, fetch, metrics
        self._may_move = may_move
        self._loaded: Announcement | None = None
        """The version that the engine holds; None for the model itself."""
        self._mark: AnnouncementMark | None = None
        """Mark of `newest`, as the queue returned it right before."""
        self._retry_at = 0.0
        """Weights that could not be fetched are asked for again from then on."""
        self._behind_since: float | None = None
        self._refusals = 0
        self.loading = False
        """A version is being fetched or loaded."""
        self._dropped = False
        """The engine has given up the weights that it had loaded."""

    def begin(self, version: int) -> None:
        """A new engine holds the model's own weights, `version` by its own account."""
        self.version, self.refused, self._loaded, self._retry_at = version, None, None, 0.0
        self._behind_since, self._refusals, self._dropped = None, 0, False
        self.cause = "the newest weights are not loaded yet"

    @property
    def announced(self) -> bool:
        """The engine's weights are of an announcement: they can be had again."""
        return self._loaded is not None

    @property
    def is_dropped(self) -> bool:
        """The engine samples from nothing."""
        return self._dropped

    def dropped(self) -> None:
        """The engine samples from nothing until what is announced is loaded, be it the version that it had."""
        self._dropped = True
        self.try_again()

    def try_again(self) -> None:
        """Try refused or unreachable versions again at the next pull."""
        self.refused, self._retry_at = None, 0.0

    async def pull(self, engine: WeightLoader) -> bool:
        """Load the newest announced weights if they are others. True once the engine has what is announced.

        Others, not only newer: a queue that lost its last second with its machine may announce an older version, or
        the same number with other weights. Refused ones are tried again when the announcement changes.
        Raises `EngineError`.
        """
        try:
            await self._look()
        except QueueError:
            return False
        newest = self.newest
        is_current = not self._dropped and (newest is None or self._holds(newest))
        if is_current:
            self.cause, self._behind_since = "", None
        elif newest is None:
            self.cause = "the weights were dropped, and the queue that announced them has forgotten their place"
        else:
            stays = self._may_move is not None and not await self._may_move()
            self._behind_since = None if stays else self._behind_since or time.monotonic()
            if not stays and newest != self.refused and time.monotonic() >= self._retry_at:
                await self._load(engine, newest)
                is_current = not self._dropped and self._holds(newest)
        self.pulls += 1
        self._metrics.lag.set(self.behind_versions)
        return is_current

    async def _look(self) -> None:
        """Fetch the announcement where its mark has changed. Raises `QueueError`.

        A mark that is older than what is fetched with it costs one more fetch at the next look, and hides nothing.
        """
        queue = self._connection.queue
        mark = await self._connection.ask(queue.latest_mark())
        if mark is None or mark != self._mark:
            self.newest = None if mark is None else await self._connection.ask(queue.latest_version())
            self._mark = mark

    def _holds(self, newest: Announcement) -> bool:
        """Return True if the engine has these weights, wherever their file is now."""
        if newest.version != self.version or self._loaded is None:
            return newest.version == self.version
        return (
            isinstance(newest.manifest, Mapping) and newest.manifest.get("tensors") == self._loaded.manifest["tensors"]
        )

    async def _load(self, engine: WeightLoader, newest: Announcement) -> None:
        began, self.loading = time.monotonic(), True
        try:
            manifest = await self._fetch(_parsed(newest))
            fetched_s = time.monotonic() - began
            report = await engine.load_weights(manifest)
        except WeightsUnreachable as error:
            self._unreachable(newest, error)
        except WeightsRefused as error:
            self._refused(newest, error)
        else:
            await self._took(report.model_copy(update={"fetch_s": report.fetch_s + fetched_s}), newest)
        finally:
            self.loading = False

    def _unreachable(self, newest: Announcement, error: Exception) -> None:
        self._retry_at = time.monotonic() + RETRY_FETCH_S
        cause = f"version {newest.version} not fetched, {self._what_stays}: {error}"
        if cause != self.cause:
            self._failed("unreachable", newest, cause)

    def _refused(self, newest: Announcement, error: Exception) -> None:
        self.refused, self._refusals = newest, self._refusals + 1
        self._metrics.refused.inc()
        self._failed("refused", newest, f"version {newest.version} refused, {self._what_stays}: {error}")

    @property
    def _what_stays(self) -> str:
        return "no version is held" if self._dropped else f"version {self.version} stays"

    def _failed(self, outcome: LoadOutcome, newest: Announcement, cause: str) -> None:
        self.cause = cause
        logger.warning(cause)
        self.history.append(WeightsLoad(version=newest.version, at_unix_s=time.time(), outcome=outcome, cause=cause))

    async def _took(self, report: LoadReport, newest: Announcement) -> None:
        now = time.time()
        self.version, self.refused, self._loaded, self.last = report.version, None, newest, report
        self._dropped = False
        self.cause, self._refusals, self._behind_since = "", 0, None
        self.history.append(WeightsLoad(version=report.version, at_unix_s=now, outcome="loaded", report=report))
        self._metrics.updated(report)
        took = (report.pause_s, report.fetch_s, report.load_s)
        update = WeightUpdate(self._name, report.version, *took, report.in_flight, at_unix_s=now)
        try:
            await self._connection.ask(self._connection.queue.report_update(update))
        except QueueError as error:
            logger.warning("the update to version %d is not in the queue: %s", report.version, error)

    @property
    def behind_versions(self) -> int:
        """Versions between what is announced and what is held; 0 where a queue went back."""
        return max(0, self.newest.version - self.version) if self.newest else 0

    @property
    def behind_s(self) -> float:
        """Since when newer weights are known and none was loaded."""
        return 0.0 if self._behind_since is None else time.monotonic() - self._behind_since

    async def straggles(self) -> str:
        """Why this server should start over; empty if it should not, or if others are no better."""
        late = self.behind_s > STRAGGLER_S and self.behind_versions >= 2
        if not late and self._refusals < 3:
            return ""
        try:
            others = await self._connection.ask(self._connection.queue.servers())
        except QueueError:
            return ""
        if not any(server.version > self.version for server in others if server.server_id != self._name):
            return ""
        return (
            f"behind the other servers: holds version {self.version}, {self.behind_versions} behind"
            f" for {self.behind_s:.0f} s, {self._refusals} loads refused; {self.cause}"
        )

    def status(self) -> WeightsStatus:
        """Return the answer of ``GET /weights``."""
        return WeightsStatus(
            version=self.version,
            newest=self.newest.version if self.newest else None,
            behind_versions=self.behind_versions,
            behind_s=round(self.behind_s, 3),
            last=self.last,
            refused=self.refused.version if self.refused else None,
            cause=self.cause,
            history=list(self.history),
        )
