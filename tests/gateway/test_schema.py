"""The routes of recorded episodes against their OpenAPI schema: what is sent is answered as it says, never by a 500."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from tests.gateway.talking_engine import TalkingEngine

from penstock.agent_loops import AgentConfig
from penstock.gateway import Gateway, GatewayJob
from penstock.rollout_server import RolloutConfig, Sidecar, make_app
from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import DataCursor, Limits, RunContext, Task

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.specs.openapi.checks import positive_data_acceptance

TOKEN = "a-token-of-this-run"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
EPISODES = 400


class ServerThread:
    """A sidecar that records, on a loop of its own."""

    def __init__(self, model: str) -> None:
        self.url: Future[str] = Future()
        self._model = model
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        queue = await self._queue()
        sidecar = Sidecar("s0", "", lambda: TalkingEngine(RolloutConfig(), self._model, Path(), 0), queue, slots=16)
        run = RunContext(queue, self._model, TOKEN, lease_ttl_s=30.0)
        capture = Gateway(GatewayJob(run, AgentConfig(), request_timeout_s=20.0), sidecar, "http://s0")
        server = uvicorn.Server(
            uvicorn.Config(
                make_app(sidecar, "m", TOKEN, lambda: None, capture), port=0, log_level="error", lifespan="off"
            )
        )
        server.install_signal_handlers = lambda: None
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        sidecar.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        running = asyncio.create_task(sidecar.run(0))
        while not await queue.servers():
            await asyncio.sleep(0.01)
        self.url.set_result(sidecar.url)
        await self._stop.wait()
        server.should_exit = True
        await serving
        await capture.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    async def _queue(self) -> MemoryTransferQueue:
        queue = MemoryTransferQueue(registry_ttl_s=600.0)
        await queue.create_run(Limits(group_size=1, groups_per_step=EPISODES, max_staleness=8), "config: 1")
        messages = [{"role": "user", "content": "What is 12+34?"}]
        rows = [Task(f"train/{i}", "train", messages, "sums", "46") for i in range(EPISODES)]
        await queue.submit(rows, cursor=DataCursor(0, EPISODES))
        return queue

    def __enter__(self) -> str:
        self._thread.start()
        return self.url.result(120)

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, tokenizer_for: Callable[[str], Any]) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("model")
    tokenizer_for("qwen2_5").save_pretrained(folder)
    with ServerThread(str(folder)) as address:
        yield address


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_every_route_answers_as_its_schema_says(url: str, mode: Any, known: bool) -> None:
    """All of schemathesis' checks, besides that valid bodies are taken: an episode may not be there, or be over."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=HEADERS)
    operations = [found.ok() for found in schema.get_all_operations()]
    mine = [operation for operation in operations if operation.path.startswith("/episodes")]
    assert len(mine) == 11
    for operation in mine:
        handle = httpx.post(f"{url}/episodes", json={}, headers=HEADERS, timeout=60).json()["handle"] if known else None
        try_out(operation, mode, handle)


def try_out(operation: Any, mode: Any, handle: str | None) -> None:
    @settings(max_examples=8, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def conforms(case: Any) -> None:
        if handle is not None and "handle" in case.path_parameters:
            case.path_parameters["handle"] = handle
        case.call_and_validate(headers=HEADERS, excluded_checks=[positive_data_acceptance])

    try:
        conforms()
    except Unsatisfiable:
        assert operation.body is None or not operation.body.items  # nothing in it that could be wrong
