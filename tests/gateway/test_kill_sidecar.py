"""kill -9 of the rollout server in the middle of an episode: its client retries, and goes on token for token."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.gateway.conftest import TOOLS
from tests.gateway.talking_engine import tool_result
from tests.ports import free_port

from penstock.transfer_queue import DataCursor, Limits, RedisServer, RedisTransferQueue, Task, TransferQueueConfig

pytestmark = [pytest.mark.redis, pytest.mark.crash]
PASSWORD, TOKEN = "a-test-password", "a-token-of-this-run"
ROOT = Path(__file__).parents[2]


class Sidecar:
    """A rollout server process on a port of its own, started again under the same name."""

    def __init__(self, redis_url: str, model: str, folder: Path) -> None:
        self.port = free_port()
        self._argv = [redis_url, PASSWORD, TOKEN, model, str(folder), str(self.port)]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gateway.talking_server", *self._argv], env=env, cwd=ROOT
        )

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def model(tmp_path: Path, tokenizer_for: Callable[[str], Any]) -> str:
    tokenizer_for("qwen2_5").save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


async def agent(client: openai.AsyncOpenAI, turns: int) -> list[str]:
    """Streams and whole answers, tools and plain turns; knows nothing of servers."""
    messages: list[Any] = [{"role": "user", "content": "Call 1+2 and 30+4"}]
    said = []
    for turn in range(turns):
        message = await ask(client, messages, stream=turn % 2 == 0)
        said.append(message.content)
        messages.append(message.to_dict())
        for call in message.tool_calls or []:
            result = tool_result(json.loads(call.function.arguments)["expression"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            messages.append({"role": "user", "content": f"Call {turn}+{turn}" if turn % 3 else f"Turn {turn}?"})
    return said


async def ask(client: openai.AsyncOpenAI, messages: list[Any], *, stream: bool) -> Any:
    """The client asks again by itself, besides a stream that has begun: that one is its user's to ask again."""
    while True:
        try:
            if not stream:
                answer: Any = await client.chat.completions.create(model="model", messages=messages, tools=TOOLS)
                return answer.choices[0].message
            async with client.chat.completions.stream(model="model", messages=messages, tools=TOOLS) as events:
                return (await events.get_final_completion()).choices[0].message
        except (openai.APIError, httpx.HTTPError):
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(("kills", "turns"), [(1, 6), pytest.param(4, 20, marks=pytest.mark.deep)])
async def test_session_survives_kills_of_its_server(tmp_path: Path, model: str, kills: int, turns: int) -> None:
    dice = random.Random(3)
    async with RedisServer(tmp_path / "redis", PASSWORD) as redis:
        queue = await RedisTransferQueue.connect(redis.url, "run", TransferQueueConfig(), PASSWORD)
        limits = Limits(group_size=1, groups_per_step=1, max_staleness=8, lease_ttl_s=600.0)  # longer than any start
        await queue.create_run(limits, "config: 1")
        await queue.submit([Task("train/0", "train", [], "sums", "46")], cursor=DataCursor(0, 1))
        sidecar = Sidecar(redis.url, model, tmp_path)
        sidecar.start()
        try:
            episode = await opened(sidecar.port)
            async with openai.AsyncOpenAI(
                base_url=episode["base_url"], api_key=episode["api_key"], max_retries=30, timeout=20
            ) as client:
                running = asyncio.create_task(agent(client, turns))
                for _ in range(kills):
                    await asyncio.sleep(dice.uniform(0.3, 1.0))
                    sidecar.kill()
                    sidecar.start()
                    await answers(sidecar.port)
                said = await running
            ending = await finished(sidecar.port, episode)
        finally:
            sidecar.kill()
        (trajectory,) = await queue.read([episode["episode_id"]])
        await queue.close()
    assert len(said) == turns
    assert said[:2] == ["Let me see.", "The answer is 3 and 34."]
    assert (ending["outcome"], ending["turns"], ending["segments"]) == ("completed", turns, 1)
    (segment,) = trajectory.segments
    assert len(segment.turn_starts) == turns


async def opened(port: int) -> dict[str, Any]:
    await answers(port)
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as http:
        response = await http.post(f"http://127.0.0.1:{port}/episodes", json={"wait_s": 30})
        assert response.status_code == 200, response.text
        return dict(response.json())


async def answers(port: int) -> None:
    """Wait until the server takes requests."""
    async with asyncio.timeout(100), httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}) as http:
        while True:
            try:
                if (await http.get(f"http://127.0.0.1:{port}/health")).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.05)


async def finished(port: int, episode: dict[str, Any]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    path = f"http://127.0.0.1:{port}/episodes/{episode['handle']}"
    async with httpx.AsyncClient(headers=headers, timeout=60) as http:
        assert (await http.post(f"{path}/reward", json={"reward": 1.0})).status_code == 200
        response = await http.post(f"{path}/finish", json={})
        assert response.status_code == 200, response.text
        return dict(response.json())
