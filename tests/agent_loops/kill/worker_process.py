"""An agent worker in a separate process, to be killed: real queue and sandbox server, a model that knows its lines.

python -m tests.agent_loops.kill.worker_process '{"name", "redis_url", "run", "model", "loop", "lines", …}'
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

import uvloop

from penstock.agent_loops import AgentConfig, ChatTokens, WorkerJob, run_worker
from penstock.agent_loops.chat import chat_of
from penstock.rollout_server import GenerateRequest, Generation
from penstock.sandbox import SandboxConfig
from penstock.testing import FakeClient
from penstock.tools import ToolConfig
from penstock.transfer_queue import Lease, RedisTransferQueue, RunContext, Trajectory, TransferQueueConfig

PASSWORD, TOKEN = "a-test-password", "a-token-of-this-run"
UNIQUE = "UNIQUE"
ASKED = "<|im_start|>user\n<tool_response>"


class Actor(FakeClient):
    """Says line n after n tool turns. While the file `hold` is there, answers after the first turn do not come.

    `UNIQUE` in a line is another number in each answer.
    """

    def __init__(self, chat: ChatTokens, lines: list[str], hold: Path | None, spread_s: float) -> None:
        said = [chat.encode(line + "<|im_end|>") for line in lines]
        self._turn = lambda context: chat.decode(context).count(ASKED)

        def reply(context: list[int]) -> list[int]:
            turn = self._turn(context)
            if UNIQUE not in lines[turn]:
                return said[turn]
            return chat.encode(lines[turn].replace(UNIQUE, secrets.token_hex(4)) + "<|im_end|>")

        super().__init__(reply)
        self._hold = hold
        self._spread_s = spread_s

    async def generate(self, request: GenerateRequest) -> Generation:
        while self._hold is not None and self._hold.exists() and self._turn(request.token_ids) > 0:
            await asyncio.sleep(0.05)
        if self._turn(request.token_ids) == 0:
            await asyncio.sleep(random.uniform(0.0, self._spread_s))  # boxes are not all asked for at once
        return await super().generate(request)


class HeldQueue(RedisTransferQueue):
    """While the folder `done` is there, an episode that would be completed leaves its name in it instead."""

    done: Path | None = None

    async def complete(self, lease: Lease, trajectory: Trajectory) -> None:
        if self.done is not None and self.done.exists():
            (self.done / lease.episode_id.replace("/", "-")).touch()
            await asyncio.Event().wait()
        await super().complete(lease, trajectory)


async def main(given: dict[str, Any]) -> None:
    config = AgentConfig(
        loop=given["loop"],
        concurrency=given["episodes"],
        max_response_tokens=given.get("max_response_tokens", 4000),
        max_turns=8,
        max_new_tokens=given.get("max_new_tokens", 256),
        episode_deadline_s=300.0,
        settings=given.get("settings", {}),
        forks=given.get("forks"),
        reward=given.get("reward", "judge.py:compute_score"),
        rewards={"settings": given.get("reward_settings", {})},
    )
    queue = await HeldQueue.connect(given["redis_url"], given["run"], TransferQueueConfig(), PASSWORD)
    queue.done = Path(given["done"]) if given.get("done") else None
    hold = Path(given["hold"]) if given.get("hold") else None
    client = Actor(chat_of(given["model"], config), given["lines"], hold, given["episodes"] / 25)
    sandbox = SandboxConfig(
        backend="remote" if given.get("sandbox_url") else "bwrap",
        url=given.get("sandbox_url"),
        max_boxes=given["episodes"] + 16,
        run_timeout_s=240.0,
        on_lost=given.get("on_lost", "replay"),
        **given.get("sandbox", {}),
    )
    tools = [ToolConfig(name="python", timeout_s=300.0)] if given.get("sandbox_url") else []
    tools += [ToolConfig(**one) for one in given.get("tools", ())]
    run = RunContext(
        queue, given["model"], TOKEN, recipe_dir=Path(given["recipe_dir"]), lease_ttl_s=given["lease_ttl_s"]
    )
    job = WorkerJob(given["name"], run, config, client, tools, sandbox, max_failures_in_a_row=1000)
    try:
        await run_worker(job)
    finally:
        await queue.close()


async def until_told(given: dict[str, Any]) -> None:
    task = asyncio.ensure_future(main(given))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await asyncio.gather(task, return_exceptions=True)
    if not task.cancelled():
        task.result()


if __name__ == "__main__":
    logging.basicConfig(level="WARNING", stream=sys.stderr)
    uvloop.run(until_told(json.loads(sys.argv[1])))
