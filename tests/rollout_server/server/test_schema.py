"""The OpenAPI schema against the app: whatever is sent is answered as the schema says, and nothing fails here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from tests.rollout_server.conftest import HEADERS, TOKEN, RunQueue, small_config
from tests.schemas import in_thread, try_out

from penstock.rollout_server import Sidecar
from penstock.rollout_server.server.routes import make_app
from penstock.testing import FakeEngine

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.specs.openapi.checks import positive_data_acceptance


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    """A sidecar with a fake engine; draining it does nothing."""
    sidecar = Sidecar("s0", "http://s0", lambda: FakeEngine(small_config(), "", None, 0), RunQueue(), slots=16)
    app = make_app(sidecar, "fake", TOKEN, lambda: None)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    server.install_signal_handlers = lambda: None
    tasks = [asyncio.create_task(sidecar.run(0)), asyncio.create_task(server.serve())]
    while not (server.started and sidecar.open):
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await tasks[1]
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with in_thread(serving()) as address:
        yield address


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_every_route_answers_as_its_schema_says(url: str, mode: Any) -> None:
    """All of schemathesis' checks: no 5xx; documented status, type and body; bad data and bad tokens refused."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=HEADERS)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 7
    for operation in operations:
        # Which ids and lengths there are is the model's, not the schema's: valid requests may be refused by /generate.
        excluded = [positive_data_acceptance] if operation.path == "/generate" else []
        try_out(operation, mode, HEADERS, examples=10, excluded=excluded)
