"""The OpenAPI schema against the app: whatever is sent is answered as the schema says, and nothing fails here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from tests.rollout_server.conftest import HEADERS, TOKEN, RunQueue, small_config

from penstock.rollout_server import Sidecar
from penstock.rollout_server.server.routes import make_app
from penstock.testing import FakeEngine

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.specs.openapi.checks import positive_data_acceptance


class ServerThread:
    """A sidecar with a fake engine on a loop of its own; draining it does nothing."""

    def __init__(self, folder: str) -> None:
        self.url: Future[str] = Future()
        self._folder = folder
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        sidecar = Sidecar("s0", "http://s0", lambda: FakeEngine(small_config(), "", None, 0), RunQueue(), slots=16)
        app = make_app(sidecar, "fake", TOKEN, lambda: None)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
        server.install_signal_handlers = lambda: None
        tasks = [asyncio.create_task(sidecar.run(0)), asyncio.create_task(server.serve())]
        while not (server.started and sidecar.open):
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        self.url.set_result(f"http://127.0.0.1:{port}")
        await self._stop.wait()
        server.should_exit = True
        await tasks[1]
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __enter__(self) -> str:
        self._thread.start()
        return self.url.result(60)

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ServerThread(str(tmp_path_factory.mktemp("logs"))) as address:
        yield address


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_every_route_answers_as_its_schema_says(url: str, mode: Any) -> None:
    """All of schemathesis' checks: no 5xx; documented status, type and body; bad data and bad tokens refused."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=HEADERS)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 7
    for operation in operations:
        try_out(operation, mode)


def try_out(operation: Any, mode: Any) -> None:
    # Which ids and lengths there are is the model's, not the schema's: valid requests may be refused by /generate.
    excluded = [positive_data_acceptance] if operation.path == "/generate" else []

    @settings(max_examples=10, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def conforms(case: Any) -> None:
        case.call_and_validate(headers=HEADERS, excluded_checks=excluded)

    try:
        conforms()
    except Unsatisfiable:
        assert operation.body is None or not operation.body.items  # nothing in it that could be wrong
