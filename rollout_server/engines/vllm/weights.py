"""A version's way into vLLM: the routes of its weight transfer, in the order in which our workers expect them.

`worker` is the other end, and says what each phase does there.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
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
"""Seconds in addition to the broadcast's own deadline."""
PAUSES = {
    "keep": "mode=keep&clear_cache=false",
    "recompute": "mode=keep&clear_cache=true",
    "abort": "mode=abort&clear_cache=true",
}
"""rollout.pause → vLLM's words."""
NO_VERSION = "none"
"""vLLM's label while it holds none: an answer that was sampled under it is not an answer (`version_of`)."""


class VLLMWeights(HttpWeights[Manifest]):
    """Loads weights through our weight-transfer engine in vLLM's workers (`worker`), which receives manifests.

    vLLM has one session of updates at a time, and a swap has one from its first byte until the weights are loaded. A
    broadcast may begin meanwhile: it is staged in that session, which it leaves as it is, or else in a separate one.
    """

    version_path = "/weight_info"
    verifies_late = True
    """Comparing every parameter would take longer than loading them."""
    world_size = 1
    _compared = Path()
    """Folder of the workers' verdicts on the last load."""

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
            if self._in_session:  # the server may have ended with the swap
                with contextlib.suppress(EngineError, TimeoutError):
                    # The session of a cancelled swap has 5 s to end: the engine ends soon after.
                    async with asyncio.timeout(5.0):
                        await self._finish()
            raise
        finally:
            self._in_session = False  # ended; or the server is, by who sees the error

    async def _read(self, manifest: Manifest) -> None:
        """Begins the swap's session, which is open afterwards unless this raises `WeightsRefused`,
        `WeightsUnreachable`."""
        with self._report("read-") as report:
            async with self._calls:
                self._in_session = True
                await self.server.call("POST", "/start_weight_update")
                await self._tell("fetch", report, manifest)
            if refusal := await self._until_said(report, "read the weights"):
                await self._finish()  # without a label
                raise WeightsUnreachable(refusal) if refusal.startswith(LOST) else WeightsRefused(refusal)

    async def _finish(self, label: Mapping[str, str] | None = None) -> None:
        """Ends the swap's session."""
        async with self._calls:
            self._in_session = False
            await self.server.call("POST", "/finish_weight_update", label)

    async def stage(self, offer: Offer) -> str:
        """Lets the first worker receive a broadcast, also while a swap is under way. See `StagingEngine`."""
        with self._report("staged-") as report:
            async with self._calls:
                alone = not self._in_session  # a separate session would drop what that swap has read
                if alone:
                    await self.server.call("POST", "/start_weight_update")
                await self._tell("stage", report, offer=offer)
                if alone:
                    await self.server.call("POST", "/finish_weight_update")  # without a label
            deadline = time.monotonic() + offer.deadline_s + STAGE_S
            while not (answers := _verdicts(report)) and time.monotonic() < deadline:
                if not self.server.alive:
                    raise EngineError(f"vLLM's workers did not receive a broadcast; {self.server.cause()}")
                await asyncio.sleep(READ_POLL_S)
        state = answers[0] if answers else f"{LOST}no worker said that it received it"
        if state.startswith(LOST):
            raise WeightsUnreachable(f"version {offer.version}: {state.removeprefix(LOST)}")
        return state

    async def receive(self, offer: Offer) -> str:
        """Lets every worker receive a broadcast in place. See `InPlaceEngine.receive_weights`."""
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
        """While decoding continues. Raises `WeightsUnreachable` if a worker cannot."""
        with self._report("joined-") as report:
            async with self._calls:
                await self.server.call("POST", "/start_weight_update")
                self._in_session = True
                await self._tell("join", report, offer=offer)
            if complaint := await self._until_said(report, "join a broadcast"):
                await self._finish()
                raise WeightsUnreachable(complaint.removeprefix(LOST))

    async def _receive(self, offer: Offer) -> str:
        """Under the pause, which stays. It ends only if no worker was given a byte: `WeightsUnreachable`."""
        self.standstill = pause = await self._stand_still()
        await self._label(NO_VERSION)
        began = time.monotonic()
        with self._report("received-") as report:
            async with self._calls:
                await self._tell("receive", report, timeout_s=offer.deadline_s + STAGE_S)
            await self._finish()  # without a label
            answers = _verdicts(report)
        pause.receive_s = time.monotonic() - began
        if len(answers) == self.world_size and all(one.startswith(LOST) for one in answers):
            await self._label(str(self.version))
            await self._resume()
            self.standstill = None
            raise WeightsUnreachable(answers[0].removeprefix(LOST))
        if len(answers) < self.world_size or len(set(answers)) > 1 or answers[0].startswith(BROKEN):
            broken = next((one.removeprefix(BROKEN) for one in answers if one.startswith(BROKEN)), "")
            raise WeightsBroken(broken or f"version {offer.version}: not all of vLLM's workers received it")
        pause.broadcast, pause.state = offer.name, answers[0]
        return answers[0]

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

    async def _tell(
        self,
        phase: str,
        report: Path,
        manifest: Manifest | None = None,
        offer: Offer | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Starts a phase of our workers in the open session; `_calls` is held. See `worker.FileUpdateInfo`."""
        info: dict[str, Any] = {
            "phase": phase,
            "report": str(report),
            "manifest": manifest.as_dict() if manifest else {},
            "workers": self.world_size,
        }
        if offer is not None:
            info["offer"] = offer.as_dict()
        await self.server.call("POST", "/update_weights", {"update_info": info}, timeout_s)

    @contextmanager
    def _report(self, prefix: str) -> Iterator[Path]:
        """A folder for the answers of workers, removed at the end."""
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=self.server.folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _until_said(self, report: Path, what: str) -> str:
        """The first complaint, or empty once every worker has none. Raises `EngineError` where one did not `what`."""
        deadline = time.monotonic() + self.server.timeout_s
        while True:
            verdicts = _verdicts(report)
            if any(verdicts) or len(verdicts) >= self.world_size:
                return next(filter(None, verdicts), "")
            if not self.server.alive or time.monotonic() > deadline:
                raise EngineError(f"vLLM's workers did not {what}; {self.server.cause()}")
            await asyncio.sleep(READ_POLL_S)

    async def _pause(self) -> None:
        await self.server.call("POST", f"/pause?{PAUSES[self.config.pause]}")  # returns when vLLM is idle

    async def _load(self, version: int, fetched: Manifest) -> None:
        self._compared = Path(tempfile.mkdtemp(prefix="held-", dir=self.server.folder))
        try:
            async with self._calls:
                self._in_session = False  # vLLM ends the session of an update that fails
                await self._tell("load", self._compared, fetched)
                self._in_session = True
        except EngineError as error:
            shutil.rmtree(self._compared, ignore_errors=True)
            # Of several ranks one may have refused what the others loaded: then the server must end.
            _, refused, reason = str(error).partition(REFUSED)
            if refused and self.world_size == 1:
                raise WeightsRefused(reason) from error
            raise
        await self._finish({"weight_version": str(version)})

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
        # vLLM samples once all is awake: without weights its cache is not moved until they are loaded.
        await self._wake_up("?tags=weights" if self.dropped else "", fully=not self.dropped)

    async def _wake_up(self, tags: str, *, fully: bool) -> None:
        """Raises `EngineError` where vLLM is not awake then: it answers 200 to tags that it does not know, too."""
        answer = await self.server.call("POST", f"/wake_up{tags}")
        if (answer["status"] == "awake") != fully:
            raise EngineError(f"vLLM says that it is {answer['status']} after /wake_up{tags}; {self.server.cause()}")


def _verdicts(report: Path) -> list[str]:
    """See `worker.FileUpdateInfo.report`."""
    return [file.read_text() for file in report.glob("[0-9]*")]
