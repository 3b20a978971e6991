"""A server's side of ``broadcast``, in its sidecar: waits at the trainer, and lets the engine's workers receive.

    member.run   POST /broadcasts … offer ──► engine.stage_weights ──► the state that the workers hold ─► POST …
    updater      announced v7 ──► StagedFetch: do they hold it? ── yes: the manifest as it is ─► engine.load_weights
                                                               ── no: its file, as under ``http``

In place the workers receive under the engine's pause, which ends with the announcement:

    member.run   … offer ──► engine.receive_weights: pause, buckets into the parameters ──► the state that came
                 waits for its announcement, `ANNOUNCE_S` at most                 busy until then
    updater      announced v7 ──► they hold it ──► engine.load_weights: label, resume
    sidecar      not busy, and the engine is paused: it holds no version ──► closed until a whole file is loaded

The address is in the announcement before: a server that knows none yet takes the file of the newest version.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

import httpx

from penstock.common import Backoff, address_towards, bearer_headers, cancel_and_wait
from penstock.weight_sync.broadcast.offer import Offer
from penstock.weight_sync.broadcast.seats import PARK_S
from penstock.weight_sync.manifest import Manifest, WeightsBroken, WeightsRefused, WeightsUnreachable

logger = logging.getLogger(__name__)
ANSWER_S = PARK_S + 20.0
POLL_S = 0.15
"""Between two looks whether an address is known."""
AGAIN = Backoff(0.2, 10.0)
"""After trainers that did not answer."""
OTHER_WIRE_S = 60.0
ANNOUNCE_S = 30.0
"""Seconds from the end of a broadcast in place to its announcement: the trainer waits for other members before it
announces."""


@runtime_checkable
class StagingEngine(Protocol):
    """An engine whose workers receive broadcasts."""

    @property
    def weight_workers(self) -> int:
        """The number of workers that need the whole version; known once the engine is started."""

    @property
    def weight_wires(self) -> tuple[str, ...]:
        """The wires that the workers can receive over, the first choice first."""

    async def stage_weights(self, offer: Offer) -> str:
        """All workers receive, while decoding continues; the state that all of them hold.

        Raises `WeightsUnreachable` where one did not receive all, `EngineError` where the engine is gone.
        """


@runtime_checkable
class InPlaceEngine(StagingEngine, Protocol):
    """An engine whose workers can receive broadcasts into its parameters."""

    @property
    def stands_still(self) -> bool:
        """True if it was paused for a broadcast and has no version since: it samples nothing."""

    async def receive_weights(self, offer: Offer) -> str:
        """All workers receive, under the pause; the state that all of them hold. `load_weights` ends the pause: of the
        announced version that came, or of a file.

        Raises `WeightsUnreachable`, `WeightsRefused` where nothing was touched and decoding continues; `WeightsBroken`
        where the engine holds no version and is paused; `EngineError` if it is gone.
        """


@dataclass(slots=True)
class _Round:
    """One broadcast that this server has places in."""

    name: str
    state: asyncio.Future[str]
    """Empty where not all came."""
    asked_for: asyncio.Event = field(default_factory=asyncio.Event)
    """True if it was announced and a caller asked whether the workers hold it."""


class BroadcastMember:
    """One engine after the other: `run` for each."""

    def __init__(self, token: str, *, in_place: bool = False) -> None:
        """`in_place`: the engine is an `InPlaceEngine`, and receives under its pause."""
        self.in_place = in_place
        self.busy = False
        """True, in place, while a version is on its way into the engine, or has arrived and may still be announced."""
        self.cause = ""
        """Reason, in place, why the last version was not received."""
        self.received = 0
        """Versions that came whole."""
        self.missed = 0
        """Broadcasts that ended early."""
        self._token = token
        self._seat = ""
        """`Offer.seat` of groups in which all workers still are; empty if there are none."""
        self._round: _Round | None = None

    async def run(self, engine: StagingEngine, address: Callable[[], str]) -> None:
        """Until cancelled. What an engine before this one held is gone with it.

        `address`: the newest announcement's URL of a broadcast; empty while there is none, and if this server must
        not be a member. Raises `EngineError`.
        """
        self._round, self.busy, self._seat = None, False, ""
        failures = 0
        try:
            # The system's certificates: httpx trusts certifi's alone, which lack a cluster's own authority.
            verify = ssl.create_default_context()
            async with httpx.AsyncClient(headers=bearer_headers(self._token), verify=verify, trust_env=False) as http:
                while True:
                    if not (url := address()):
                        await asyncio.sleep(POLL_S)
                        continue
                    try:
                        offer = await self._park_while(http, engine, url, address)
                        failures = 0
                    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError, ValueError) as error:
                        failures += 1
                        logger.info("no place in the next broadcast: %r", error)
                        await asyncio.sleep(AGAIN.pause_s(failures))
                        continue
                    if offer is not None:
                        self.busy = self.in_place
                        await self._receive(engine, offer)
                        self.busy = False
        finally:
            self.busy = False

    async def holds(self, manifest: Manifest) -> bool:
        """Return True if the workers hold exactly this version; waits for its broadcast if that is under way. Called
        once.
        """
        current = self._round
        if current is None or current.name != manifest.broadcast_name:
            return False
        state = await asyncio.shield(current.state)
        current.asked_for.set()
        if self._round is current:
            self._round = None
        if state and state != manifest.state:
            logger.warning("version %d came as other tensors than announced: its file is taken", manifest.version)
        return state == manifest.state

    async def _receive(self, engine: StagingEngine, offer: Offer) -> None:
        current = self._round = _Round(offer.name, asyncio.get_running_loop().create_future())
        state, self._seat = "", ""
        try:
            if self.in_place:
                assert isinstance(engine, InPlaceEngine)
                state = await engine.receive_weights(offer)
            else:
                state = await engine.stage_weights(offer)
            self.received += 1
            self._seat = offer.seat
        except (WeightsUnreachable, WeightsRefused) as error:
            self.missed += 1
            logger.warning("%s; its file is taken", error)
        except WeightsBroken as error:
            self.missed += 1
            self.cause = f"no version is held until a file is loaded: {error}"
            logger.error("%s", self.cause)
        finally:
            current.state.set_result(state)
        if state and self.in_place:
            await self._until_announced(current, offer.version)

    async def _until_announced(self, current: _Round, version: int) -> None:
        """A trainer that is gone announces nothing: then the received bytes are not a version."""
        self.cause = (
            f"no version is held until a file is loaded: version {version} came as other tensors than announced"
        )
        try:
            async with asyncio.timeout(ANNOUNCE_S):
                await current.asked_for.wait()
        except TimeoutError:
            self.cause = (
                f"no version is held until a file is loaded: version {version} was broadcast, and not announced in"
                f" {ANNOUNCE_S:g} s"
            )
            logger.error("%s", self.cause)
            if self._round is current:
                self._round = None

    async def _park_while(
        self, http: httpx.AsyncClient, engine: StagingEngine, url: str, address: Callable[[], str]
    ) -> Offer | None:
        """Run `_park`; a server that must not be a member any more leaves, so that the others do not wait for it."""
        parking = asyncio.create_task(self._park(http, url, engine), name="wait for a broadcast")
        try:
            while not parking.done():
                await asyncio.wait({parking}, timeout=POLL_S)
                if not address() and not parking.done():
                    return None
            return parking.result()
        finally:
            await cancel_and_wait([parking])

    async def _park(self, http: httpx.AsyncClient, url: str, engine: StagingEngine) -> Offer | None:
        """Wait for the next broadcast. None if none began, or if this server takes files."""
        place = url.rpartition("/")[0]
        wires = ",".join(engine.weight_wires)
        body: dict[str, Any] = {"count": engine.weight_workers, "wire": wires, "seat": self._seat}
        async with asyncio.timeout(ANSWER_S):
            answer = await http.post(place, json=body, timeout=None)
        if answer.status_code == 409:
            logger.error("%s", answer.text[:500])
            await asyncio.sleep(OTHER_WIRE_S)
            return None
        if answer.status_code == 204:
            return None
        answer.raise_for_status()
        offer = Offer.parse(answer.json())
        target = urlsplit(url)
        host = target.hostname or ""
        here = await asyncio.to_thread(address_towards, host, target.port or 80)
        return replace(offer, trainer=host, here=here)
