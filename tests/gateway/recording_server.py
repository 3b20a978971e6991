"""A rollout server in this process that records episodes: an engine in words, a memory queue, real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from tests.gateway.conftest import USER
from tests.gateway.talking_engine import TalkingEngine

from penstock.agent_loops import AgentConfig
from penstock.gateway import GatewayJob, mount
from penstock.rollout_server import RolloutConfig, ServerJob, serve
from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import DataCursor, Limits, RunContext, Task, Trajectory

MODEL = "tiny-qwen"
TOKEN = "a-token-of-this-run"
RUN = {"Authorization": f"Bearer {TOKEN}"}
LIMITS = Limits(group_size=4, groups_per_step=2, max_staleness=8, lease_ttl_s=30.0)
CALL = {"role": "user", "content": "Call 1+2 and 30+4"}


@dataclass
class Server:
    """A rollout server in this process."""

    queue: MemoryTransferQueue
    task: asyncio.Task[None]
    engines: list[TalkingEngine]
    url: str = ""
    clients: list[Any] = field(default_factory=list)

    @property
    def engine(self) -> TalkingEngine:
        return self.engines[-1]

    async def open(self) -> dict[str, Any]:
        response = await self.post("/episodes", {})
        assert response.status_code == 200, response.text
        return response.json()

    def client(self, episode: dict[str, Any], **fields: Any) -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(
            base_url=episode["base_url"], api_key=episode["api_key"], **{"max_retries": 0, "timeout": 120, **fields}
        )
        self.clients.append(client)
        return client

    def anthropic(self, episode: dict[str, Any], **fields: Any) -> anthropic.AsyncAnthropic:
        client = anthropic.AsyncAnthropic(
            base_url=episode["anthropic_base_url"],
            **{"max_retries": 0, "timeout": 120, "api_key": episode["api_key"], **fields},
        )
        self.clients.append(client)
        return client

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        async with httpx.AsyncClient(timeout=60, headers=RUN if headers is None else headers) as http:
            return await http.post(self.url + path, json=body)

    async def finish(self, episode: dict[str, Any], reward: float = 1.0) -> Trajectory:
        path = f"/episodes/{episode['handle']}"
        assert (await self.post(f"{path}/reward", {"reward": reward})).status_code == 200
        ended = await self.post(f"{path}/finish", {})
        assert ended.status_code == 200, ended.text
        (trajectory,) = await self.queue.read([episode["episode_id"]])
        return trajectory


@asynccontextmanager
async def recording_server(
    tmp_path: Path,
    model: str,
    engine: Callable[..., TalkingEngine] | None = TalkingEngine,
    *,
    rollout: RolloutConfig | None = None,
    tasks: int = 2,
    limits: Limits = LIMITS,
    **agent: Any,
) -> AsyncIterator[Server]:
    """`engine` None: that of `rollout`. `agent`: settings other than these tests' own."""
    queue = MemoryTransferQueue(registry_ttl_s=60.0)
    await queue.create_run(limits, "config: 1")
    rows = [Task(f"train/{i}", "train", [USER], "sums", "46", extra_info={"level": 3}) for i in range(tasks)]
    await queue.submit(rows, cursor=DataCursor(0, tasks))
    usual = {"max_turns": 50, "max_response_tokens": 20_000, "max_new_tokens": 400}
    config = AgentConfig(**{**usual, **agent, "capture": {"model_aliases": ["gpt-4o"]}})
    run = RunContext(queue, model, TOKEN, lease_ttl_s=30.0)
    recorded = GatewayJob(run, config, request_timeout_s=120.0)
    engines: list[TalkingEngine] = []

    def new_engine(*settings: Any) -> TalkingEngine:
        assert engine is not None
        engines.append(engine(*settings, token_s=0.001))
        return engines[-1]

    job = ServerJob("s0", run, rollout or RolloutConfig(), tmp_path, mount=mount(recorded), drain_s=2.0)
    serving = serve(job) if engine is None else serve(job, new_engine)
    running = Server(queue, asyncio.create_task(serving), engines)
    async with asyncio.timeout(120):
        while not (registered := await queue.servers()):
            await asyncio.sleep(0.01)
    running.url = registered[0].url
    yield running
    for client in running.clients:
        await client.close()
    running.task.cancel()
    await asyncio.gather(running.task, return_exceptions=True)


@pytest.fixture
def talking_model(tmp_path: Path, tokenizer_for: Callable[[str], Any]) -> str:
    """A folder with a tokenizer."""
    tokenizer_for("qwen2_5").save_pretrained(tmp_path / MODEL)
    return str(tmp_path / MODEL)


@pytest.fixture
async def server(tmp_path: Path, talking_model: str) -> AsyncIterator[Server]:
    async with recording_server(tmp_path, talking_model) as running:
        yield running
