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
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from tests.gateway.recording_server import RUN, recording_server

from penstock.transfer_queue import Limits

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.specs.openapi.checks import positive_data_acceptance

EPISODES = 400


class ServerThread:
    """A server that records, on a loop of its own."""

    def __init__(self, folder: Path, model: str) -> None:
        self.url: Future[str] = Future()
        self._folder, self._model = folder, model
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        limits = Limits(group_size=1, groups_per_step=EPISODES, max_staleness=8, lease_ttl_s=30.0)
        async with recording_server(self._folder, self._model, tasks=EPISODES, limits=limits) as server:
            self.url.set_result(server.url)
            await self._stop.wait()

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
    with ServerThread(folder, str(folder)) as address:
        yield address


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_every_route_answers_as_its_schema_says(url: str, mode: Any, known: bool) -> None:
    """All of schemathesis' checks, besides that valid bodies are taken: an episode may not be there, or be over."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=RUN)
    operations = [found.ok() for found in schema.get_all_operations()]
    mine = [operation for operation in operations if operation.path.startswith("/episodes")]
    assert len(mine) == 16
    for operation in mine:
        handle = httpx.post(f"{url}/episodes", json={}, headers=RUN, timeout=60).json()["handle"] if known else None
        try_out(operation, mode, handle)


def try_out(operation: Any, mode: Any, handle: str | None) -> None:
    @settings(max_examples=8, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def conforms(case: Any) -> None:
        if handle is not None and "handle" in case.path_parameters:
            case.path_parameters["handle"] = handle
        case.call_and_validate(headers=RUN, excluded_checks=[positive_data_acceptance])

    try:
        conforms()
    except Unsatisfiable:
        assert operation.body is None or not operation.body.items  # nothing in it that could be wrong
