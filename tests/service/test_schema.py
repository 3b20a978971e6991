"""Whatever is sent to the API, it answers: a client repeats a request that ended in a 5xx without end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from penstock.transfer_queue import RedisServer

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.checks import not_a_server_error
from service_parts import KEYS, Service

pytestmark = pytest.mark.redis
HEADERS = {"X-API-Key": KEYS["alice"]}


@pytest.fixture(scope="module")
def url(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An API without a trainer, on a loop of its own."""
    address: Future[str] = Future()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with Service(redis_server.url, "schema", "", tmp_path_factory.mktemp("schema")) as service:
            object.__setattr__(service.context, "hold_s", 0.01)
            address.set_result(service.url)
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    yield address.result(60)
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_no_request_ends_in_a_mistake_of_the_server(url: str, mode: Any) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=HEADERS)
    operations = [one.ok() for one in schema.get_all_operations()]
    assert len(operations) >= 25
    for operation in operations:
        try_out(operation, mode)


def try_out(operation: Any, mode: Any) -> None:
    @settings(max_examples=10, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def answers(case: Any) -> None:
        case.call_and_validate(headers=HEADERS, timeout=120, checks=[not_a_server_error])

    try:
        answers()
    except Unsatisfiable:
        assert operation.body is None or not operation.body.items  # nothing in it that could be wrong
