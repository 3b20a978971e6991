"""Limits of owners: each is reached, and others go on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from service_parts import NAME, Client, Service

from penstock.service.config import Quota
from penstock.trainer import Ranks

pytestmark = [pytest.mark.redis, pytest.mark.torch]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    opened = Ranks.open(timeout_s=60)
    yield opened
    opened.close()


@pytest_asyncio.fixture
async def limited(service: Service, ranks: Ranks) -> AsyncIterator[Service]:
    service.quotas = {"alice": Quota(tokens=5, steps=1, adapters=1, checkpoint_bytes=1)}
    await service.restart_trainer(ranks)
    yield service


async def error_of(client: Client, request_id: str) -> str:
    result = await client.result(request_id)
    return str(result["error"]) if isinstance(result, dict) and "error" in result else ""


async def test_each_limit_is_named_and_others_have_their_own(limited: Service, ranks: Ranks) -> None:
    for name, refused in (("alice", True), ("bob", False)):
        client = limited.client(name)
        model = await client.model()
        session = (await client.post("create_session", tags=[]))["session_id"]
        words = {"session_id": session, "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 4}}
        further = (await client.post("create_model", **words))["request_id"]
        assert ("of 1 adapters" in await error_of(client, further)) == refused
        for number in (1, 2):
            request = await client.forward(model, number)
        assert ("of 5 tokens" in await error_of(client, request)) == refused
        assert await error_of(client, await client.step(model, 3)) == ""
        assert ("of 1 steps" in await error_of(client, await client.step(model, 4))) == refused
        saved = (await client.post("save_weights", model_id=model, seq_id=5, path="first"))["request_id"]
        assert await error_of(client, saved) == ""
        saved = (await client.post("save_weights", model_id=model, seq_id=6, path="second"))["request_id"]
        assert ("of 1 checkpoint_bytes" in await error_of(client, saved)) == refused
        await limited.restart_trainer(ranks)  # what was used is kept
        assert ("of 5 tokens" in await error_of(client, await client.forward(model, 7))) == refused
