"""A server's side of ``broadcast``, in its sidecar: waits at the trainer, and lets the engine's workers receive.

    member.run   POST /broadcasts … offer ──► engine.stage_weights ──► the state that the workers hold ─► POST …
    updater      announced v7 ──► StagedFetch: do they hold it? ── yes: the manifest as it is ─► engine.load_weights
                                                               ── no: its file, as under ``http``

The address is in the announcement before: a server that knows none yet takes the file of the newest version.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

import aiohttp

from penstock.common import Backoff, bearer_headers
from penstock.weight_sync.broadcast.offer import Offer
from penstock.weight_sync.broadcast.seats import PARK_S
from penstock.weight_sync.fetch import ClosableFetch
from penstock.weight_sync.manifest import Manifest, WeightsRefused, WeightsUnreachable

logger = logging.getLogger(__name__)
ANSWER_S = PARK_S + 20.0
POLL_S = 0.15
"""Between two looks whether an address is known."""
AGAIN = Backoff(0.2, 10.0)
"""After trainers that did not answer."""
OTHER_WIRE_S = 60.0


@runtime_checkable
class StagingEngine(Protocol):
    """An engine whose workers receive broadcasts."""

    @property
    def weight_workers(self) -> int:
        """How many of them need the whole version; known once it is started."""

    @property
    def weight_wires(self) -> tuple[str, ...]:
        """What they can receive over, the first choice first."""

    async def stage_weights(self, offer: Offer) -> str:
        """All workers receive, while decoding goes on; the state that all of them hold.

        Raises `WeightsUnreachable` where one did not receive all, `EngineError` where the engine is gone.
        """


@dataclass(slots=True)
class _Round:
    """One broadcast that this server has places in."""

    name: str
    state: asyncio.Future[str]
    """Empty where not all came."""


class BroadcastMember:
    """One engine after the other: `run` for each."""

    def __init__(self, token: str) -> None:
        self.received = 0
        """Versions that came whole."""
        self.missed = 0
        """Broadcasts that ended early."""
        self._token = token
        self._round: _Round | None = None

    async def run(self, engine: StagingEngine, address: Callable[[], str]) -> None:
        """Until cancelled. What an engine before this one held is gone with it.

        `address`: the newest announcement's URL of a broadcast; empty while there is none. Raises `EngineError`.
        """
        self._round = None
        failures = 0
        try:
            async with aiohttp.ClientSession(headers=bearer_headers(self._token)) as http:
                while True:
                    if not (url := address()):
                        await asyncio.sleep(POLL_S)
                        continue
                    try:
                        offer = await self._park(http, url, engine)
                        failures = 0
                    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                        failures += 1
                        logger.info("no place in the next broadcast: %r", error)
                        await asyncio.sleep(AGAIN.pause_s(failures))
                        continue
                    if offer is not None:
                        await self._receive(engine, offer)
        finally:
            if self._round is not None and not self._round.state.done():
                self._round.state.set_result("")

    async def holds(self, manifest: Manifest) -> bool:
        """Whether the workers hold exactly this version; waits for a broadcast of it that is under way. Once."""
        current = self._round
        if current is None or current.name != manifest.broadcast_name:
            return False
        state = await asyncio.shield(current.state)
        if self._round is current:
            self._round = None
        if state and state != manifest.state:
            logger.warning("version %d came as other tensors than announced: its file is taken", manifest.version)
        return state == manifest.state

    async def _receive(self, engine: StagingEngine, offer: Offer) -> None:
        current = self._round = _Round(offer.name, asyncio.get_running_loop().create_future())
        state = ""
        try:
            state = await engine.stage_weights(offer)
            self.received += 1
        except (WeightsUnreachable, WeightsRefused) as error:
            self.missed += 1
            logger.warning("%s; its file is taken", error)
        finally:
            if not current.state.done():
                current.state.set_result(state)

    async def _park(self, http: aiohttp.ClientSession, url: str, engine: StagingEngine) -> Offer | None:
        """Wait for the next broadcast. None where none began, or where this server takes files."""
        place = url.rpartition("/")[0]
        body: dict[str, Any] = {"count": engine.weight_workers, "wire": ",".join(engine.weight_wires)}
        async with http.post(place, json=body, timeout=aiohttp.ClientTimeout(ANSWER_S)) as answer:
            if answer.status == 409:
                logger.error("%s", (await answer.text())[:500])
                await asyncio.sleep(OTHER_WIRE_S)
                return None
            if answer.status == 204:
                return None
            answer.raise_for_status()
            offer = Offer.parse(await answer.json())
        target = urlsplit(url)
        host = target.hostname or ""
        here = await asyncio.to_thread(_address_towards, host, target.port or 80)
        return replace(offer, trainer=host, here=here)


class StagedFetch:
    """See `Fetch`: what the workers hold needs no fetch."""

    def __init__(self, member: BroadcastMember, fetch: ClosableFetch) -> None:
        self._member, self._fetch = member, fetch

    async def __call__(self, manifest: Manifest, /) -> Manifest:
        if manifest.broadcast and await self._member.holds(manifest):
            return manifest
        return await self._fetch(manifest)

    async def close(self) -> None:
        await self._fetch.close()


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the way to `host`; nothing is sent. Raises `OSError`."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
