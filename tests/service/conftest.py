"""A service in this process: a real Redis, the API over HTTP, and a trainer that can be killed and started again."""

from __future__ import annotations

import secrets
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from penstock.transfer_queue import RedisServer

sys.path.insert(0, str(Path(__file__).parent))

from service_parts import PASSWORD, Service


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def redis_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RedisServer]:
    async with RedisServer(tmp_path_factory.mktemp("redis"), PASSWORD) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.tiny_model import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture
async def service(redis_server: RedisServer, tiny_model: str, tmp_path: Path) -> AsyncIterator[Service]:
    async with Service(redis_server.url, f"s-{secrets.token_hex(4)}", tiny_model, tmp_path) as opened:
        yield opened
