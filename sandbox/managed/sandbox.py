"""Boxes that a provider makes: started, tried again, counted and cleared away the same way for each provider.

    ManagedSandbox ──► ManagedApi (one adapter per provider) ──► the provider's SDK ──► its API
         └─► ManagedBox per session ──► the driver in it, as in every other box

A wait for the provider blocks no other caller: a start that is refused holds its place among `STARTS_AT_ONCE`
only while it asks, not between two attempts. A start whose answer never came is looked for by its label
before another is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from penstock.common import Backoff, cancel_and_wait
from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.limited import LimitedSandbox, SessionSlot
from penstock.sandbox.managed.api import (
    CALL_TIMEOUT_S,
    PROVIDERS,
    ApiBusy,
    ApiUnavailable,
    BoxRequest,
    CopyingApi,
    ManagedApi,
)
from penstock.sandbox.managed.box import ManagedBox
from penstock.sandbox.managed.costs import CostGauges, CostMeter
from penstock.sandbox.managed.labels import (
    BOX,
    MAKER,
    REQUEST,
    box_labels,
    is_abandoned,
    owner_labels,
    process_labels,
)
from penstock.sandbox.protocol import (
    WORKDIR_VARIABLE,
    BoxNeeds,
    Sandbox,
    SandboxError,
    Session,
)
from penstock.sandbox.session import DriverSession
from penstock.sandbox.snapshots import TMP, BoxCopy, copy_folders

logger = logging.getLogger(__name__)
TTL_HEADROOM_S = 300.0
TIDY_DEADLINE_S = 120.0
STARTS_AT_ONCE = 8
"""Boxes of one process that are being made at once."""
LATE_S = 600.0
"""A box whose request was never answered does not appear later than this."""
CLOSE_DEADLINE_S = 60.0
PAUSE = Backoff(0.5, 30.0, jitter=(0.5, 1.0))
T = TypeVar("T")


class ManagedSandbox(LimitedSandbox):
    """Maker of a provider's boxes for one process."""

    def __init__(self, config: SandboxConfig, owner: str, episode_deadline_s: float | None = None) -> None:
        """Raises `SandboxError` where the provider's SDK or its key is missing; the message names the fix."""
        super().__init__(config)
        if config.folders:
            raise SandboxError(
                f"sandbox.folders: boxes of {config.backend} see no folder of this machine: put it into their image"
            )
        self.costs = CostMeter(config.managed)
        self.ttl_s = config.managed.ttl_s or int((episode_deadline_s or 600.0) + TTL_HEADROOM_S)
        self._owner = owner
        self._api: ManagedApi = PROVIDERS.get(config.backend)(config)
        self._starting = asyncio.Semaphore(STARTS_AT_ONCE)
        self._maker = secrets.token_hex(6)
        self._living: set[str] = set()
        self._boxes: dict[str, str] = {}
        """Session → the id of its newest box."""
        self._tidying: asyncio.Task[None] | None = None
        self._leftovers: dict[str, float] = {}
        """Request, whose box may live though no session has it → the time from which no further one can appear."""
        self.containment = f"{config.backend}: {self._api.containment}; code of a session can forge its own results"
        logger.info("sandbox: %s", self.containment)

    def check_image(self, image: str | None) -> None:
        """Any that the provider has, which is asked when a box is made."""

    def check_needs(self, needs: BoxNeeds) -> None:
        super().check_needs(needs)
        self._api.check_needs(needs)

    async def start(self, label: str, *, image: str | None = None, needs: BoxNeeds | None = None) -> Session:
        if self._tidying is None or (self._leftovers and self._tidying.done()):
            # not awaited: what was left delays no episode
            self._tidying = asyncio.create_task(self._tidy(first=self._tidying is None), name="tidying of boxes")
        return await super().start(label, image=image, needs=needs)

    async def _open(self, slot: SessionSlot, release: Callable[[], None]) -> Session:
        def launch() -> Awaitable[ManagedBox]:
            return self._launch(slot)

        def released() -> None:
            self._boxes.pop(slot.session_id, None)
            release()

        return DriverSession(slot.session_id, self.config, await launch(), launch, released)

    async def _launch(self, slot: SessionSlot) -> ManagedBox:
        """A running box with a driver in it. Raises `SandboxError`."""
        request = secrets.token_hex(12)
        labels = {**box_labels(self._owner, slot.session_id, request, self.ttl_s), MAKER: self._maker}
        box_request = BoxRequest(request, labels, slot.image, slot.needs, self.ttl_s)
        self.costs.start(request)
        try:
            box_id = await self._create(box_request)
        except BaseException:
            self.costs.forget(request)
            raise
        self._living.add(box_id)
        self._boxes[slot.session_id] = box_id
        root = slot.needs.own_root
        settings: dict[str, object] = {
            "boxed": False,
            "reaper": True,
            "counts_oom_kills": True,
            "cpu_s": self.config.cpu_s,
            "output_bytes": self.config.output_bytes,
            "workdir_variable": WORKDIR_VARIABLE,
        }
        return await ManagedBox.start(
            f"penstock-{request}",
            settings,
            lambda argv: self._bounded(lambda: self._api.open(box_id, argv, root=root), "opening a box"),
            lambda: self._finish(box_id, request),
        )

    async def _create(self, request: BoxRequest) -> str:
        """Raises `SandboxError`; a box that no session has, and that may live or appear late, is left to `_tidy`."""
        in_doubt = False

        async def attempt() -> str:
            nonlocal in_doubt
            async with self._starting:
                try:
                    limit_s = self.config.managed.start_timeout_s
                    return await self._bounded(lambda: self._api.create(request), "making a box", limit_s)
                except (ApiUnavailable, asyncio.CancelledError):
                    in_doubt = True
                    raise

        try:
            return await self._patiently(attempt)
        finally:
            if in_doubt:
                self._leftovers[request.key] = time.monotonic() + LATE_S

    async def _finish(self, box_id: str, request: str) -> None:
        """Ends the provider's box; if that fails, the next start or `close` tries again, and its age ends it."""
        self._living.discard(box_id)
        try:
            await self._end(box_id)
            self.costs.end(request)
        except SandboxError as error:
            self._leftovers[request] = time.monotonic()
            logger.error("sandbox: box %s was not ended, it is tried again later: %s", box_id, error)

    async def _end(self, box_id: str) -> None:
        await self._patiently(lambda: self._bounded(lambda: self._api.end(box_id), "ending a box"))

    async def _tidy(self, first: bool) -> None:
        """Tidy up in the background: a failure is logged, it does not belong to an episode."""
        try:
            async with asyncio.timeout(TIDY_DEADLINE_S):
                if first and (ended := await end_abandoned(self._api, owner_labels(self._owner))):
                    logger.warning("sandbox: ended %d boxes that an earlier process of %s left", ended, self._owner)
                for request, last in list(self._leftovers.items()):
                    find = partial(self._api.find, {**BOX, REQUEST: request})
                    for box in await self._bounded(find, "looking for a box"):
                        if box.box_id not in self._living:
                            await self._end(box.box_id)
                    if time.monotonic() >= last:
                        self._leftovers.pop(request, None)
                        self.costs.end(request)
        except (SandboxError, TimeoutError) as error:
            logger.warning("sandbox: looking for boxes that were left: %s", error or "no answer in time")

    async def _patiently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """`attempt` until it is answered; raises the provider's last refusal after `retry_for_s`."""
        deadline = time.monotonic() + self.config.managed.retry_for_s
        failures = 0
        while True:
            try:
                return await attempt()
            except (ApiBusy, ApiUnavailable) as error:
                failures += 1
                pause_s = PAUSE.pause_s(failures, at_least_s=error.after_s if isinstance(error, ApiBusy) else None)
                if time.monotonic() + pause_s > deadline:
                    raise
                logger.warning("sandbox: %s; asked again in %.1f s", error, pause_s)
                await asyncio.sleep(pause_s)

    async def _bounded(self, call: Callable[[], Awaitable[T]], doing: str, limit_s: float = CALL_TIMEOUT_S) -> T:
        """The result of `call`. Raises `ApiUnavailable` past `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                return await call()
        except TimeoutError as error:
            raise ApiUnavailable(f"{self.config.backend}: {doing}: no answer in {limit_s:g} s") from error

    async def _copy(self, session: Session, slot: SessionSlot) -> BoxCopy:
        """With its own root, if the provider makes images of boxes: an image, and /tmp next to it.

        Whether such an image has /tmp, which may be in memory, differs.
        """
        api = self._api
        if not slot.needs.own_root or not isinstance(api, CopyingApi):
            return await super()._copy(session, slot)
        assert isinstance(session, DriverSession)
        copy = BoxCopy(await copy_folders(session, [TMP]), None, slot.needs)
        limit_s = self.config.managed.start_timeout_s
        try:
            image = await session.hold(
                lambda _: self._bounded(
                    lambda: api.copy(self._boxes[slot.session_id], self.ttl_s), "copying a box", limit_s
                )
            )
        except BaseException:
            copy.close()
            raise
        return replace(copy, image=image)

    async def _drop(self, copy: BoxCopy) -> None:
        """One try: the provider drops an image at its age."""
        await super()._drop(copy)
        api, image = self._api, copy.image
        if image is None or not copy.needs.own_root or not isinstance(api, CopyingApi):
            return
        try:
            await self._bounded(lambda: api.forget(image), "removing a copy")
        except SandboxError as error:
            logger.warning("sandbox: the copy %s ends at its age (%d s): %s", image, self.ttl_s, error)

    async def close(self) -> None:
        """Ends every box of this process, those of starts that were given up and arrived late among them."""
        await cancel_and_wait([self._tidying] if self._tidying is not None else [])
        await super().close()
        try:
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                if self._leftovers:
                    for box in await self._api.find({**process_labels(self._owner), MAKER: self._maker}):
                        await self._end(box.box_id)
                        self.costs.end(box.labels.get(REQUEST, ""))
                    self._leftovers.clear()
        except (SandboxError, TimeoutError) as error:
            logger.error("sandbox: boxes may live on until their age ends them (%d s): %s", self.ttl_s, error)
        finally:
            await self._api.close()


async def end_abandoned(api: ManagedApi, labels: dict[str, str]) -> int:
    """Ends the boxes with `labels` that no living process holds; returns how many. Raises `SandboxError`."""
    abandoned = [box for box in await api.find(labels) if is_abandoned(box.labels)]
    for box in abandoned:
        await api.end(box.box_id)
    return len(abandoned)


def follow_costs(sandbox: Sandbox, gauges: CostGauges) -> None:
    """Connects the gauges to the costs of a provider's boxes; other boxes cost nothing by the second."""
    if isinstance(sandbox, ManagedSandbox):
        gauges.follow(sandbox.costs)


async def end_boxes_of_dead_processes(config: SandboxConfig) -> int:
    """Whichever run's: those of this machine's processes that are gone, and of others those past their age.

    Raises `SandboxError`.
    """
    api: ManagedApi = PROVIDERS.get(config.backend)(config)
    try:
        async with asyncio.timeout(TIDY_DEADLINE_S):
            return await end_abandoned(api, BOX)
    except TimeoutError as error:
        raise SandboxError(f"{config.backend}: no answer in {TIDY_DEADLINE_S:.0f} s") from error
    finally:
        await api.close()
