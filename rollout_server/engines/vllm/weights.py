"""How vLLM gets a version: the routes of its weight transfer, in the order in which our workers expect them.

`worker` is the other end, and says what each phase does there.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.checkpoint import check_complete, check_names
from penstock.rollout_server.engines.http.server_process import ChildServer
from penstock.rollout_server.engines.http.stream import AnswerStream
from penstock.rollout_server.engines.http.weights import HttpWeights
from penstock.rollout_server.engines.vllm_plugin import BROKEN, LOST, REFUSED
from penstock.rollout_server.protocol import EngineError, SleepLevel
from penstock.weight_sync import LoadReport, Manifest, Offer, WeightsBroken, WeightsRefused, WeightsUnreachable

READ_POLL_S = 0.01
STAGE_S = 30.0
"""Beside a broadcast's own deadline."""
GIVE_UP_S = 5.0
"""For ending the session of a swap that was cancelled: the engine ends soon after."""
PAUSES = {
    "keep": "mode=keep&clear_cache=false",
    "recompute": "mode=keep&clear_cache=true",
    "abort": "mode=abort&clear_cache=true",
}
"""rollout.pause → vLLM's words."""
NO_VERSION = "none"
"""vLLM's label while it holds none: an answer that was sampled under it is no answer (`version_of`)."""


class VLLMWeights(HttpWeights[Manifest]):
    """By our weight-transfer engine in vLLM's workers (`worker`), which receives manifests.

    vLLM has one session of updates at a time, and a swap has one from its first byte until the weights are loaded. A
    broadcast may begin meanwhile: it is staged in that session, which it leaves as it is, or else in one of its own.
    """

    version_path = "/weight_info"
    verifies_late = True
    """Comparing every parameter would take longer than loading them."""
    world_size = 1
    _compared = Path()
    """Where the workers say how they found what they hold since the last load."""

    def __init__(
        self, config: RolloutConfig, model: str, server: ChildServer, streams: Collection[AnswerStream]
    ) -> None:
        super().__init__(config, model, server, streams)
        self._calls = asyncio.Lock()
        """Held from a look at `_in_session` until the calls that depend on it are answered; never while waiting."""
        self._in_session = False
        """A swap's session is open in vLLM."""

    async def _look(self) -> list[str]:
        await self._label("0")
        self.world_size = int((await self.server.call("GET", "/get_world_size"))["world_size"])
        return []

    @asynccontextmanager
    async def _fetch(self, manifest: Manifest) -> AsyncGenerator[Manifest]:
        """The workers read and verify in the background: what is left of it later would lengthen the pause."""
        check_complete(manifest, self.shapes)
        try:
            await self._read(manifest)
            yield manifest
        except asyncio.CancelledError:
            await self._give_up_session()
            raise
        finally:
            self._in_session = False  # ended; or the server is, by who sees the error

    async def _read(self, manifest: Manifest) -> None:
        """Begins the swap's session, which is open afterwards unless this raises `WeightsRefused`,
        `WeightsUnreachable`."""
        report = self._folder("read-")
        try:
            async with self._calls:
                self._in_session = True
                await self.server.call("POST", "/start_weight_update")
                await self._update(manifest, "fetch", report=str(report))
            if refusal := await self._until_said(report, "read the weights"):
                await self._finish()  # without a label
                raise WeightsUnreachable(refusal) if refusal.startswith(LOST) else WeightsRefused(refusal)
        finally:
            shutil.rmtree(report, ignore_errors=True)

    async def _finish(self, label: Mapping[str, str] | None = None) -> None:
        """Ends the swap's session."""
        async with self._calls:
            self._in_session = False
            await self.server.call("POST", "/finish_weight_update", label)

    async def _give_up_session(self) -> None:
        """The swap was cancelled, in whatever call; the server may have ended with it."""
        if self._in_session:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(GIVE_UP_S):
                    await self._finish()

    async def stage(self, offer: Offer) -> str:
        """Let the first worker receive a broadcast, also while a swap is under way. See `StagingEngine`."""
        report = self._folder("staged-")
        info = {"manifest": {}, "phase": "stage", "report": str(report), "offer": offer.as_dict()}
        try:
            async with self._calls:
                await self._stage(info)
            return await self._until_staged(offer, report)
        finally:
            shutil.rmtree(report, ignore_errors=True)

    async def _stage(self, info: Mapping[str, Any]) -> None:
        """In the session of a swap: one of its own would drop what that swap has read."""
        alone = not self._in_session
        if alone:
            await self.server.call("POST", "/start_weight_update")
        await self.server.call("POST", "/update_weights", {"update_info": info})
        if alone:
            await self.server.call("POST", "/finish_weight_update")  # without a label

    async def _until_staged(self, offer: Offer, report: Path) -> str:
        """The state that came. Raises `WeightsUnreachable` where not all did, `EngineError` where vLLM is gone."""
        deadline = time.monotonic() + offer.deadline_s + STAGE_S
        while not (said := _said(report)) and time.monotonic() < deadline:
            if not self.server.alive:
                raise EngineError(f"vLLM's workers did not receive a broadcast; {self.server.cause()}")
            await asyncio.sleep(READ_POLL_S)
        state = said[0] if said else f"{LOST}no worker said that it received it"
        if state.startswith(LOST):
            raise WeightsUnreachable(f"version {offer.version}: {state.removeprefix(LOST)}")
        return state

    async def receive(self, offer: Offer) -> str:
        """Let every worker receive a broadcast in place. See `InPlaceEngine.receive_weights`."""
        async with self._one_at_a_time:
            if self.standstill is not None:
                raise WeightsUnreachable(f"version {offer.version}: vLLM waits for a file")
            check_names(offer.version, {tensor.name: tensor.shape for tensor in offer.tensors}, self.shapes)
            await self.until_verified()
            late = f"broadcast {offer.name} was not received in"
            async with self._or_end(late, offer.deadline_s + STAGE_S):
                await self._join(offer)
                self.admission.close()
                try:
                    return await self._receive(offer)
                finally:
                    self._admit()

    async def _join(self, offer: Offer) -> None:
        """While decoding continues. Raises `WeightsUnreachable` where a worker could not."""
        report = self._folder("joined-")
        try:
            await self._open_session()
            await self._tell({"phase": "join", "report": str(report), "offer": offer.as_dict()})
            if complaint := await self._until_said(report, "join a broadcast"):
                await self._finish()
                raise WeightsUnreachable(complaint.removeprefix(LOST))
        finally:
            shutil.rmtree(report, ignore_errors=True)

    async def _receive(self, offer: Offer) -> str:
        """Under the pause, which stays. Only where no worker was given a byte it ends: `WeightsUnreachable`."""
        self.standstill = pause = await self._stand_still()
        await self._label(NO_VERSION)
        began, report = time.monotonic(), self._folder("received-")
        try:
            await self._tell({"phase": "receive", "report": str(report)}, offer.deadline_s + STAGE_S)
            await self._finish()  # without a label
            said = _said(report)
        finally:
            shutil.rmtree(report, ignore_errors=True)
        pause.receive_s = time.monotonic() - began
        if len(said) == self.world_size and all(one.startswith(LOST) for one in said):
            await self._label(str(self.version))
            await self._resume()
            self.standstill = None
            raise WeightsUnreachable(said[0].removeprefix(LOST))
        states = set(said)
        if len(said) < self.world_size or len(states) > 1 or said[0].startswith(BROKEN):
            broken = next((one.removeprefix(BROKEN) for one in said if one.startswith(BROKEN)), "")
            raise WeightsBroken(broken or f"version {offer.version}: not all of vLLM's workers received it")
        pause.broadcast, pause.state = offer.name, said[0]
        return said[0]

    async def swap(self, manifest: Manifest) -> LoadReport:
        """See `HttpWeights.swap`; a version that came in place needs its label alone."""
        if self.standstill is None or not self.standstill.holds(manifest):
            return await super().swap(manifest)
        async with self._one_at_a_time:
            pause = self.standstill
            if pause is None or not pause.holds(manifest):  # another version was loaded meanwhile
                raise WeightsUnreachable(f"version {manifest.version}: this server does not hold its broadcast")
            check_complete(manifest, self.shapes)
            try:
                async with self._or_end("the version that came was not labelled in"):
                    await self._label(str(manifest.version))
                    pause_s, load_s, in_flight = await self._serve(manifest.version, pause, pause.receive_s, None)
            finally:
                self._admit()
        return LoadReport(version=self.version, fetch_s=0.0, pause_s=pause_s, load_s=load_s, in_flight=in_flight)

    async def _label(self, label: str) -> None:
        await self.server.call("POST", "/update_weight_version", {"new_version": label})

    async def _open_session(self) -> None:
        async with self._calls:
            await self.server.call("POST", "/start_weight_update")
            self._in_session = True

    async def _tell(self, info: Mapping[str, Any], timeout_s: float | None = None) -> None:
        """What our workers do in the session that is open."""
        body = {"update_info": {"manifest": {}, **info}}
        async with self._calls:
            await self.server.call("POST", "/update_weights", body, timeout_s)

    def _folder(self, prefix: str) -> Path:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=self.server.folder))

    async def _until_said(self, report: Path, what: str) -> str:
        """The first complaint, or empty once every worker has none. Raises `EngineError` where one did not `what`."""
        deadline = time.monotonic() + self.config.start_timeout_s
        while True:
            said = _said(report)
            if any(said) or len(said) >= self.world_size:
                return next(filter(None, said), "")
            if not self.server.alive or time.monotonic() > deadline:
                raise EngineError(f"vLLM's workers did not {what}; {self.server.cause()}")
            await asyncio.sleep(READ_POLL_S)

    async def _pause(self) -> None:
        await self.server.call("POST", f"/pause?{PAUSES[self.config.pause]}")  # returns when vLLM is idle

    async def _load(self, version: int, fetched: Manifest) -> None:
        self._compared = self._folder("held-")
        try:
            await self._load_in_session(fetched)
        except EngineError as error:
            shutil.rmtree(self._compared, ignore_errors=True)
            # Of several ranks one may have refused what the others loaded: then the server must end.
            _, refused, reason = str(error).partition(REFUSED)
            if refused and self.world_size == 1:
                raise WeightsRefused(reason) from error
            raise
        await self._finish({"weight_version": str(version)})

    async def _load_in_session(self, fetched: Manifest) -> None:
        async with self._calls:
            try:
                await self._update(fetched, "load", report=str(self._compared))
            except BaseException:
                self._in_session = False  # vLLM ends the session of an update that fails
                raise

    async def _verify(self, fetched: Manifest) -> None:
        """Each worker compares what it holds since the load with the verified bytes."""
        try:
            complaint = await self._until_said(self._compared, "compare the weights that they hold")
        finally:
            shutil.rmtree(self._compared, ignore_errors=True)
        if complaint:
            raise EngineError(f"a worker of vLLM {complaint}")

    async def _resume(self) -> None:
        if self.dropped:
            await self._wake_up("?tags=kv_cache", fully=True)
        else:
            await self.server.call("POST", "/resume")

    async def _sleep(self, level: SleepLevel) -> None:
        await self.server.call("POST", f"/sleep?level={level}&mode=abort")  # returns when it sleeps

    async def _wake(self) -> None:
        # vLLM samples once all is awake: without weights its cache stays where it is until they are loaded.
        await self._wake_up("?tags=weights" if self.dropped else "", fully=not self.dropped)

    async def _wake_up(self, tags: str, *, fully: bool) -> None:
        """Raises `EngineError` where vLLM is not awake then: it answers 200 to tags that it does not know, too."""
        answer = await self.server.call("POST", f"/wake_up{tags}")
        if (answer["status"] == "awake") != fully:
            raise EngineError(f"vLLM says that it is {answer['status']} after /wake_up{tags}; {self.server.cause()}")

    async def _update(self, manifest: Manifest, phase: str, *, report: str = "") -> None:
        info = {"manifest": manifest.as_dict(), "phase": phase, "report": report}
        await self.server.call("POST", "/update_weights", {"update_info": info})


def _said(report: Path) -> list[str]:
    """See `worker.FileUpdateInfo.report`."""
    return [file.read_text() for file in report.glob("[0-9]*")]
