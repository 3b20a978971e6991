"""Redis, a sandbox server over real boxes, and agent workers in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio as aioredis
from tests.agent_loops.kill.gated_sandbox import GatedSandbox
from tests.agent_loops.kill.worker_process import PASSWORD, TOKEN
from tests.until import until

from penstock.common import HttpServer, listen
from penstock.sandbox import SandboxConfig, make_sandbox
from penstock.sandbox.server import build_app
from penstock.transfer_queue import (
    JournalEntry,
    JournalKind,
    Limits,
    RedisServer,
    RedisTransferQueue,
    Task,
    Trajectory,
    TransferQueueConfig,
)
from penstock.transfer_queue.redis import journal_from_values

ROOT = Path(__file__).parents[3]
LEASE_TTL_S = 15.0
"""A worker of 200 episodes on a busy machine must not lose one: what it had done would be replayed, and counted."""
GROUP_SIZE = 4
Journals = dict[str, list[JournalEntry]]
JUDGE = """
async def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(ground_truth in extra_info["final_text"])
"""


@dataclass(frozen=True)
class Stage:
    """One run in Redis; `worker` starts a process that works on it."""

    queue: RedisTransferQueue
    redis_url: str
    run: str
    model: str
    worker: Callable[..., subprocess.Popen[bytes]]

    async def submit(self, episodes: int, branches: int = 0, **fields: Any) -> None:
        groups = episodes // GROUP_SIZE
        await self.queue.create_run(
            Limits(
                *(GROUP_SIZE, groups),
                max_staleness=0,
                lease_ttl_s=LEASE_TTL_S,
                max_attempts=20,
                max_lost_leases=1000,  # workers are killed from outside
                branches=branches,
            ),
            "{}",
        )
        messages = [{"role": "user", "content": "What is 12+34?"}]
        await self.queue.submit(
            [Task(f"train/{n:08d}", "train", messages, "sums", "46", **fields) for n in range(groups)]
        )

    async def journaled(self, episodes: int, kind: JournalKind, deadline_s: float = 200.0) -> Journals:
        """Entries of `kind` in Redis, by episode, once so many episodes have one."""
        async with asyncio.timeout(deadline_s), aioredis.Redis.from_url(self.redis_url, password=PASSWORD) as client:
            while True:
                found: Journals = {}
                async for key in client.scan_iter(match=f"penstock:{{{self.run}}}:journal:*"):
                    entries = journal_from_values(await client.hvals(key))
                    found[key.decode().partition(":journal:")[2]] = [one for one in entries if one.kind is kind]
                if sum(map(bool, found.values())) == episodes:
                    return found
                await asyncio.sleep(0.05)

    async def finished(self, episodes: int, deadline_s: float = 200.0) -> list[Trajectory]:
        """Once all are; those that failed would be missing for ever."""
        async with asyncio.timeout(deadline_s):
            while (counts := (await self.queue.status()).episodes)["completed"] < episodes:
                assert not counts.get("failed"), await self.queue.dead_letters()
                await asyncio.sleep(0.1)
        return await self.queue.read(sorted(await self.queue.held()))


@pytest_asyncio.fixture
async def stage(tmp_path: Path, tokenizer_for: Callable[[str], Any]) -> AsyncIterator[Stage]:
    tokenizer_for("qwen2_5").save_pretrained(tmp_path / "model")
    (tmp_path / "judge.py").write_text(JUDGE)
    run = f"kill-{secrets.token_hex(4)}"
    processes: list[subprocess.Popen[bytes]] = []

    async with RedisServer(tmp_path / "redis", PASSWORD) as server:

        def worker(name: str, **given: Any) -> subprocess.Popen[bytes]:
            plain = {"name": name, "redis_url": server.url, "run": run, "model": str(tmp_path / "model")}
            plain["recipe_dir"] = str(tmp_path)
            env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
            argv = [sys.executable, "-m", "tests.agent_loops.kill.worker_process"]
            given = {**plain, "lease_ttl_s": LEASE_TTL_S, "loop": "tool_agent", **given}
            processes.append(subprocess.Popen([*argv, json.dumps(given)], env=env, cwd=ROOT))
            return processes[-1]

        queue = await RedisTransferQueue.connect(server.url, run, TransferQueueConfig(), PASSWORD)
        try:
            yield Stage(queue, server.url, run, str(tmp_path / "model"), worker)
        finally:
            for process in processes:
                process.kill()
                process.wait()
            await queue.close()


@dataclass(frozen=True)
class Boxes:
    url: str
    sandbox: GatedSandbox
    server: Any
    """Its `ServerState`."""


@pytest.fixture
def boxes_of() -> Callable[[int], contextlib.AbstractAsyncContextManager[Boxes]]:
    """count → a server with so many boxes ready."""

    @contextlib.asynccontextmanager
    async def make(count: int) -> AsyncIterator[Boxes]:
        config = SandboxConfig(max_boxes=count, run_timeout_s=240.0, server={"warm": {"default": count}})
        sandbox = GatedSandbox(make_sandbox(config, f"kill-tests-{os.getpid()}"))
        app = build_app(sandbox, config, TOKEN)
        http = HttpServer(app, listen("127.0.0.1", 0), stop_s=2)
        await http.start()
        state = app.state.server
        try:
            await until(lambda: state.pool.warm == count)
            yield Boxes(http.url.rstrip("/"), sandbox, state)
        finally:
            sandbox.open.set()
            await http.stop()

    return make


def stop(process: subprocess.Popen[bytes]) -> None:
    """As a supervisor does."""
    process.send_signal(signal.SIGTERM)
    assert process.wait(200) == 0
