"""The routes of recorded episodes against their OpenAPI schema: what is sent is answered as it says, never by a 500."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.gateway.recording_server import RUN, recording_server
from tests.schemas import in_thread, try_out

from penstock.transfer_queue import Limits

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.specs.openapi.checks import positive_data_acceptance

EPISODES = 400


@asynccontextmanager
async def recording(folder: Path) -> AsyncIterator[str]:
    limits = Limits(group_size=1, groups_per_step=EPISODES, max_staleness=8, lease_ttl_s=30.0)
    async with recording_server(folder, str(folder), tasks=EPISODES, limits=limits) as server:
        yield server.url


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, tokenizer_for: Callable[[str], Any]) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("model")
    tokenizer_for("qwen2_5").save_pretrained(folder)
    with in_thread(recording(folder)) as address:
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

        def prepare(case: Any, handle: str | None = handle) -> None:
            if handle is not None and "handle" in case.path_parameters:
                case.path_parameters["handle"] = handle

        try_out(operation, mode, RUN, examples=8, excluded=[positive_data_acceptance], prepare=prepare)
