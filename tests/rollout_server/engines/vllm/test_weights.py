"""In which order vLLM is told of a version, without vLLM: a server that notes its calls, workers made by hand.

What is sampled before the workers have compared what they hold reaches nobody.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.rollout_server.conftest import ask
from tests.rollout_server.engines.http.event_server import stream_events
from tests.rollout_server.engines.http.event_server import vllm_event as event
from tests.rollout_server.engines.stand_ins import MANIFEST, VLLM, running
from tests.until import until

from penstock.rollout_server import Chunk, EngineError, RolloutConfig, RolloutMetrics
from penstock.rollout_server.engines.http import stream as http_stream
from penstock.rollout_server.engines.vllm import engine as vllm
from penstock.rollout_server.engines.vllm import weights as vllm_weights
from penstock.rollout_server.server.registration import QueueConnection
from penstock.rollout_server.server.request_queue import RequestQueue
from penstock.rollout_server.server.usage import ServerUsage
from penstock.testing import MemoryTransferQueue
from penstock.weight_sync import (
    Manifest,
    Offer,
    WeightsBroken,
    WeightsRefused,
    WeightsUnreachable,
    state_of,
)

PHASES = ("fetch", "load", "stage")


async def weights_of(server: VLLM, workers: int) -> vllm_weights.VLLMWeights:
    weights = vllm_weights.VLLMWeights(RolloutConfig(engine="vllm"), str(server.folder), server, set())  # type: ignore[arg-type]
    weights.world_size = workers
    return weights


async def a_while() -> None:
    await asyncio.sleep(5 * vllm_weights.READ_POLL_S)


async def test_the_pause_begins_when_every_worker_has_read(tmp_path: Path) -> None:
    server = VLLM(tmp_path, manual=PHASES)
    swap = asyncio.create_task((await weights_of(server, 2)).swap(MANIFEST))
    report = await server.manual["fetch"]
    before = ["/start_weight_update", "/update_weights fetch"]
    await a_while()
    assert server.steps == before
    (report / "101").write_text("")
    await a_while()
    assert server.steps == before
    (report / "102").write_text("")
    assert (await swap).version == 3
    after = ["/pause", "/update_weights load", "/finish_weight_update", "/weight_info", "/resume"]
    assert server.steps == before + after
    assert not report.exists()
    await server.stop()


async def test_reading_and_loading_have_the_servers_deadline_not_that_of_a_start(tmp_path: Path) -> None:
    server = VLLM(tmp_path, manual=("fetch", "load"))
    weights = await weights_of(server, 1)
    weights.config = RolloutConfig(engine="vllm", start_timeout_s=0.001)
    swap = asyncio.create_task(weights.swap(MANIFEST))
    for phase in ("fetch", "load"):
        report = await server.manual[phase]
        await a_while()
        (report / "101").write_text("")
    assert (await swap).version == 3
    await weights.until_verified()
    await server.stop()


async def test_what_a_worker_refuses_does_not_pause(tmp_path: Path) -> None:
    server = VLLM(tmp_path, manual=PHASES)
    swap = asyncio.create_task((await weights_of(server, 2)).swap(MANIFEST))
    report = await server.manual["fetch"]
    (report / "101").write_text("")
    (report / "102").write_text("tensor 'a' is damaged")
    with pytest.raises(WeightsRefused, match="tensor 'a' is damaged"):
        await swap
    assert server.steps == ["/start_weight_update", "/update_weights fetch", "/finish_weight_update"]
    assert server.alive


async def test_a_server_that_ends_meanwhile_is_an_error(tmp_path: Path) -> None:
    server = VLLM(tmp_path, manual=PHASES)
    swap = asyncio.create_task((await weights_of(server, 1)).swap(MANIFEST))
    await server.manual["fetch"]
    server.alive = False
    with pytest.raises(EngineError, match="did not read the weights"):
        await swap


OFFER = Offer(4, 1, "life-1", "life-1", 1, 1, 2, 1, 1.0, 1.0, (), (), ())


async def received(server: VLLM) -> None:
    """What the worker says of a broadcast."""
    ((await server.manual["stage"]) / "101").write_text("state of 4")


async def test_a_broadcast_that_begins_during_a_load_is_staged_in_its_session(tmp_path: Path) -> None:
    """A session of its own would drop what was read, and waiting for the load would cost all members the broadcast."""
    server = VLLM(tmp_path, manual=PHASES)
    weights = await weights_of(server, 1)
    swap = asyncio.create_task(weights.swap(MANIFEST))
    report = await server.manual["fetch"]
    stage = asyncio.create_task(weights.stage(OFFER))
    await received(server)
    assert await asyncio.wait_for(stage, 60) == "state of 4"
    assert server.steps == ["/start_weight_update", "/update_weights fetch", "/update_weights stage"]
    (report / "101").write_text("")
    assert (await swap).version == 3
    after = ["/pause", "/update_weights load", "/finish_weight_update", "/weight_info", "/resume"]
    assert server.steps[3:] == after
    await server.stop()


STATE = state_of(())
CAME = Manifest("broadcast", MANIFEST.files, (), broadcast="http://trainer/broadcasts/life-1")
JOIN = ["/start_weight_update", "/update_weights join", "/pause", "/update_weight_version", "/update_weights receive"]


def labels(server: VLLM) -> list[str]:
    return [body["new_version"] for path, body in server.calls if path == "/update_weight_version"]


async def in_place(server: VLLM, *says: str) -> vllm_weights.VLLMWeights:
    """After a broadcast of which the workers say this."""
    server.says = {"join": [""] * len(says), "receive": list(says)}
    weights = await weights_of(server, len(says))
    weights.version = 2
    await weights.receive(replace(OFFER, version=3))
    return weights


async def test_version_in_place_is_labelled_once_it_is_announced(tmp_path: Path) -> None:
    server = VLLM(tmp_path, manual=PHASES)
    weights = await in_place(server, STATE, STATE)
    assert server.steps == [*JOIN, "/finish_weight_update"]
    assert labels(server) == [vllm_weights.NO_VERSION]
    assert not weights.admission.is_open
    report = await weights.swap(CAME)
    assert server.steps[6:] == ["/update_weight_version", "/weight_info", "/resume"]
    assert (labels(server)[1:], weights.admission.is_open, weights.standstill) == (["3"], True, None)
    assert report.pause_s >= report.load_s > 0


@pytest.mark.parametrize(
    "says",
    [("broken: gone",), ("broken: gone", STATE), ("lost: gone", STATE), ("lost: gone", "broken: gone"), (STATE, "1")],
)
async def test_half_a_version_in_place_waits_for_a_file(says: tuple[str, ...], tmp_path: Path) -> None:
    server = VLLM(tmp_path, manual=PHASES)
    server.says = {"join": [""] * len(says), "receive": list(says)}
    weights = await weights_of(server, len(says))
    with pytest.raises(WeightsBroken):
        await weights.receive(replace(OFFER, version=3))
    assert "/resume" not in server.steps
    assert not weights.admission.is_open
    with pytest.raises(WeightsUnreachable, match="waits for a file"):
        await weights.receive(replace(OFFER, version=4))
    before = len(server.steps)
    swap = asyncio.create_task(weights.swap(MANIFEST))
    report = await server.manual["fetch"]
    for number in range(len(says)):
        (report / str(101 + number)).write_text("")
    assert (await swap).version == 3
    after = ["/start_weight_update", "/update_weights fetch", "/update_weights load", "/finish_weight_update"]
    assert server.steps[before:] == [*after, "/weight_info", "/resume"]
    assert (weights.admission.is_open, weights.standstill) == (True, None)
    await server.stop()


async def test_broadcast_in_place_without_a_byte_keeps_the_version(tmp_path: Path) -> None:
    server = VLLM(tmp_path, manual=PHASES)
    with pytest.raises(WeightsUnreachable, match="gone"):
        await in_place(server, "lost: gone", "lost: gone")
    assert server.steps[5:] == ["/finish_weight_update", "/update_weight_version", "/resume"]
    assert labels(server) == [vllm_weights.NO_VERSION, "2"]


def test_answer_sampled_without_a_version_is_none() -> None:
    with pytest.raises(ValueError, match="none"):
        http_stream.version_of(vllm_weights.NO_VERSION)


@pytest.mark.parametrize("before", ["nothing", "a load", "a refusal", "a refused load", "a cancelled load"])
async def test_a_broadcast_beside_no_load_has_a_session_of_its_own(before: str, tmp_path: Path) -> None:
    server = VLLM(tmp_path, manual=PHASES)
    weights = await weights_of(server, 1)
    if before != "nothing":
        server.refuses_load = before == "a refused load"
        swap = asyncio.create_task(weights.swap(MANIFEST))
        report = await server.manual["fetch"]
        if before == "a cancelled load":
            swap.cancel()
        (report / "101").write_text("tensor 'a' is damaged" if before == "a refusal" else "")
        await asyncio.wait({swap})
        assert swap.cancelled() == (before == "a cancelled load")
        refused = not swap.cancelled() and isinstance(swap.exception(), WeightsRefused)
        assert refused == (before in ("a refusal", "a refused load"))
        assert server.alive
        # vLLM itself ends the session of an update that fails.
        ended = server.steps.count("/finish_weight_update") + (before == "a refused load")
        assert server.steps.count("/start_weight_update") == ended == 1
    server.calls.clear()
    stage = asyncio.create_task(weights.stage(OFFER))
    await received(server)
    assert await asyncio.wait_for(stage, 60) == "state of 4"
    assert server.steps == ["/start_weight_update", "/update_weights stage", "/finish_weight_update"]
    await server.stop()


class Client:
    """One request and what came of it."""

    def __init__(self, queue: RequestQueue, engine: vllm.VLLMEngine, prompt: int) -> None:
        self.chunks: list[Chunk] = []
        self.answer = asyncio.create_task(self._read(queue, engine, prompt))

    async def _read(self, queue: RequestQueue, engine: vllm.VLLMEngine, prompt: int) -> None:
        async for chunk in queue.generate(engine, ask([prompt], 4)):
            self.chunks.append(chunk)

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def versions(self) -> list[int]:
        """Of each token."""
        return [v for chunk in self.chunks for v, start, end in chunk.version_spans for _ in range(start, end)]


class OnTrial:
    """An engine that loads version 3 while `began` is answered; `began` and `after` end before the verdict."""

    def __init__(self) -> None:
        usage = ServerUsage("rollout-0", QueueConnection(MemoryTransferQueue()), lambda: True)
        self.queue = RequestQueue(4, RolloutMetrics(), truncated_sampling=False, usage=usage)
        self.loaded, self.may_end = asyncio.Event(), asyncio.Event()
        self.may_end.set()
        self.engine: Any = None
        self.server: Any = None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if (await request.json())["token_ids"] == [2]:
            return await stream_events(request, [event([21]), event([22], "length", [(3, 0, 2)])])
        response = web.StreamResponse()
        await response.prepare(request)
        for line in (event([11]), event([12])):
            await send(response, line)
        await self.loaded.wait()
        await send(response, event([13]))
        await self.may_end.wait()
        await send(response, event([14], "length", [(0, 0, 2), (3, 2, 4)]))
        return response

    async def load(self) -> tuple[Client, Client]:
        """Both answers are complete in the engine, the verdict is outstanding."""
        began = Client(self.queue, self.engine, 1)
        await until(lambda: began.token_ids == [11, 12])
        swap = asyncio.create_task(self.engine.load_weights(MANIFEST))
        (await self.server.manual["fetch"] / "101").write_text("")
        assert (await swap).version == 3
        self.loaded.set()
        after = Client(self.queue, self.engine, 2)
        await asyncio.sleep(0)
        await until(lambda: all(stream.ended for stream in self.server.streams))
        await a_while()
        return began, after

    async def verdict(self) -> Path:
        return await self.server.manual["load"] / "101"


async def send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await asyncio.sleep(0.01)  # a segment of its own


@asynccontextmanager
async def on_trial(folder: Path) -> AsyncIterator[OnTrial]:
    trial = OnTrial()
    async with running("vllm", 1, folder, manual=PHASES, answer=trial.answer) as (trial.engine, trial.server):
        yield trial


async def test_what_is_sampled_before_the_verdict_comes_after_it(tmp_path: Path) -> None:
    async with on_trial(tmp_path) as trial:
        began, after = await trial.load()
        assert (began.token_ids, after.token_ids) == ([11, 12], [])
        (await trial.verdict()).write_text("")
        await asyncio.wait_for(asyncio.gather(began.answer, after.answer), 60)
    assert (began.token_ids, began.versions) == ([11, 12, 13, 14], [0, 0, 3, 3])
    assert (after.token_ids, after.versions) == ([21, 22], [3, 3])
    assert [client.chunks[-1].finish_reason for client in (began, after)] == ["length", "length"]


async def test_token_that_is_handed_on_before_the_end_has_the_version_of_its_moment(tmp_path: Path) -> None:
    async with on_trial(tmp_path) as trial:
        trial.may_end.clear()
        began = Client(trial.queue, trial.engine, 1)
        await until(lambda: began.token_ids == [11, 12])
        swap = asyncio.create_task(trial.engine.load_weights(MANIFEST))
        (await trial.server.manual["fetch"] / "101").write_text("")
        await swap
        (await trial.verdict()).write_text("")
        trial.loaded.set()
        await until(lambda: began.token_ids == [11, 12, 13])
        trial.may_end.set()
        await asyncio.wait_for(began.answer, 60)
    assert (began.token_ids, began.versions) == ([11, 12, 13, 14], [0, 0, 3, 3])


async def test_nobody_gets_a_token_of_weights_that_are_not_the_versions(tmp_path: Path) -> None:
    async with on_trial(tmp_path) as trial:
        began, after = await trial.load()
        (await trial.verdict()).write_text("holds other values in parameter norm.weight")
        outcomes = await asyncio.wait_for(asyncio.gather(began.answer, after.answer, return_exceptions=True), 60)
        assert [isinstance(outcome, EngineError) and outcome.retryable for outcome in outcomes] == [True, True]
        assert (began.token_ids, began.versions) == ([11, 12], [0, 0])
        assert after.token_ids == []
        assert not trial.server.alive


async def test_the_next_version_waits_for_the_verdict_of_the_last(tmp_path: Path) -> None:
    async with on_trial(tmp_path) as trial:
        began, after = await trial.load()
        verdict = await trial.verdict()
        trial.server.manual = {phase: asyncio.get_running_loop().create_future() for phase in ("fetch", "load")}
        swap = asyncio.create_task(trial.engine.load_weights(MANIFEST))
        (await trial.server.manual["fetch"] / "101").write_text("")
        await a_while()
        assert trial.server.steps[-1] == "/update_weights fetch"
        verdict.write_text("")
        await asyncio.wait_for(asyncio.gather(began.answer, after.answer, swap), 60)
        assert trial.server.steps[-1] == "/resume"
