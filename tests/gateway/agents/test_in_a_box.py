"""Coding agents, unmodified, in boxes with a broken repository: their page's settings, a scripted model, training."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.agent_loops.kill.conftest import Stage, stop
from tests.agent_loops.kill.worker_process import ASKED, PASSWORD
from tests.gateway.conftest import sampled, whole
from tests.recipes.swe.conftest import Data, data

from penstock.agent_loops import AgentConfig, WorkerJob, run_worker
from penstock.agent_loops.chat import chat_of, load_tokenizer
from penstock.rollout_server import GenerateRequest, Generation
from penstock.sandbox import SandboxConfig
from penstock.testing import FakeClient, MemoryTransferQueue
from penstock.tools import ToolConfig
from penstock.trainer import load_rows
from penstock.transfer_queue import (
    Archive,
    JournalKind,
    Limits,
    RedisServer,
    RedisTransferQueue,
    RunContext,
    Task,
    Trajectory,
    TransferQueueConfig,
)

__all__ = ["data"]
ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/from/coding_agents.md"
INSTALLED = ROOT / ".agents"
MODEL = str(ROOT / "recipes/calculator/model")
pytestmark = [pytest.mark.agents, pytest.mark.bwrap, pytest.mark.deep]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True)
class Agent:
    """One of the page's: what its model calls to run a shell command, and how it ends."""

    title: str
    program: str
    """Path below `.agents` without which it is not installed."""
    tool: str
    argument: str
    last: str
    more: tuple[str, ...] = ()
    """Arguments that make its prompt short, for training."""
    arguments: Mapping[str, Any] | None = None

    def shell(self, command: str) -> str:
        return call(self.tool, **{self.argument: command, **(self.arguments or {})})

    def says(self, task: Task, *, repairs: bool = True) -> list[str]:
        """Its answers: it looks, applies the reference patch (or not), and ends."""
        patch = task.extra_info["patch"]
        apply = f"git apply --whitespace=nowarn - <<'END_OF_PATCH'\n{patch}END_OF_PATCH"
        return [
            f"<think>\nI look first.\n</think>\n\n{self.shell('git log --oneline; ls')}",
            self.shell(apply if repairs else "true"),
            self.last,
        ]

    def settings(self) -> dict[str, Any]:
        """The recipe's part on the page."""
        part = PAGE.read_text().partition(f"## {self.title}\n")[2]
        recipe: dict[str, Any] = yaml.safe_load(part.partition("```yaml\n")[2].partition("```")[0])
        return recipe


MINI = Agent(
    "mini-swe-agent",
    "mini/minisweagent",
    "bash",
    "command",
    call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
)
CLAUDE = Agent("Claude Code", "claude/node_modules/.bin/claude", "Bash", "command", "Repaired.", ("--bare",))
CODEX = Agent("Codex", "codex/node_modules/.bin/codex", "exec_command", "cmd", "Repaired.")
QWEN = Agent(
    "qwen-code",
    "qwen/node_modules/.bin/qwen",
    "run_shell_command",
    "command",
    "Repaired.",
    arguments={"is_background": False},
)


def asked_of(*agents: Agent) -> Any:
    """The test runs with each of these; one that is not installed is skipped."""
    return pytest.mark.parametrize(
        "agent",
        [
            pytest.param(
                agent,
                id=agent.title,
                marks=pytest.mark.skipif(
                    not (INSTALLED / agent.program).exists(),
                    reason=f"{agent.title} is missing: scripts/setup-agents installs it",
                ),
            )
            for agent in agents
        ],
    )


class Script(FakeClient):
    """Says line n of an episode after n results of tools. Keeps requests and answers."""

    def __init__(self, agent: Agent, tasks: Mapping[str, Task], fails: str = "") -> None:
        super().__init__(lambda context: [])
        self.chat = chat_of(MODEL, AgentConfig())
        self.answers: list[list[int]] = []
        self._agent, self._tasks, self._fails = agent, tasks, fails

    async def generate(self, request: GenerateRequest) -> Generation:
        task, _, member = request.episode_id.rpartition("#")
        lines = self._agent.says(self._tasks[task], repairs=member != self._fails)
        line = lines[min(self.chat.decode(request.token_ids).count(ASKED), len(lines) - 1)]
        ids = [*self.chat.encode(line), self.chat.turn_end_id][: request.sampling.max_new_tokens]
        self.requests.append(request)
        self.answers.append(ids)
        return Generation(ids, [-0.5] * len(ids), [(0, 0, len(ids))], "stop")


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random weights with room for an agent's prompt, and the tokenizer of `MODEL`."""
    pytest.importorskip("torch")
    from tests.tiny_model import save_tiny_model

    folder = tmp_path_factory.mktemp("long-model")
    tokenizer = load_tokenizer(MODEL)
    save_tiny_model(folder, vocab_size=len(tokenizer), max_position_embeddings=65_536)
    tokenizer.save_pretrained(folder)
    return str(folder)


@dataclass(frozen=True)
class World:
    """What the episodes of a test run in."""

    queue: MemoryTransferQueue
    client: Script
    job: WorkerJob


def tasks_of(data: Data, count: int) -> list[Task]:
    rows = load_rows(data.tasks)
    return [rows[number % len(rows)].task(f"train/0000/{number:08d}", "train") for number in range(count)]


def config_of(agent: Agent, more: tuple[str, ...] = ()) -> tuple[AgentConfig, SandboxConfig]:
    recipe = agent.settings()
    given = recipe["agent"]
    settings = {**given["settings"], "command": [*given["settings"]["command"], *more]}
    limits = {"max_turns": 30, "max_new_tokens": 100_000, "max_response_tokens": 200_000, "episode_deadline_s": 500.0}
    boxes = {**recipe["sandbox"], "folders": {"/agents": str(INSTALLED)}, "max_boxes": 2, "run_timeout_s": 60.0}
    return AgentConfig(**{**given, "settings": settings, "concurrency": 2, **limits}), SandboxConfig(**boxes)


def world_of(agent: Agent, data: Data, tasks: list[Task], limits: Limits, folder: Path, **script: Any) -> World:
    config, boxes = config_of(agent, script.pop("more", ()))
    queue = MemoryTransferQueue(archive=Archive(folder / "batches"))
    client = Script(agent, {task.task_id: task for task in tasks}, **script)
    tools = [ToolConfig(name="swe", timeout_s=60, settings={"repositories": str(data.folder / "data/swe")})]
    run = RunContext(queue, MODEL, lease_ttl_s=limits.lease_ttl_s)
    return World(queue, client, WorkerJob("agents", run, config, client, tools, boxes))


async def finished(world: World, count: int) -> list[Trajectory]:
    """So many episodes of the queue, run by a worker."""
    worker = asyncio.create_task(run_worker(world.job))
    try:
        async with asyncio.timeout(550):
            while (counts := (await world.queue.status()).episodes)["completed"] < count:
                assert not counts.get("failed"), await world.queue.dead_letters()
                assert not worker.done(), worker.result()
                await asyncio.sleep(0.1)
        return await world.queue.read(sorted(await world.queue.held()))
    finally:
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)


@asked_of(MINI, CLAUDE, CODEX, QWEN)
async def test_an_agent_repairs_a_package_and_is_recorded_token_for_token(
    data: Data,
    tmp_path: Path,
    agent: Agent,
) -> None:
    (task,) = tasks_of(data, 1)
    limits = Limits(group_size=1, groups_per_step=1, max_staleness=0, max_attempts=1, lease_ttl_s=60.0)
    world = world_of(agent, data, [task], limits, tmp_path)
    await world.queue.create_run(limits, "")
    await world.queue.submit([task])
    (trajectory,) = await finished(world, 1)
    assert (trajectory.outcome.kind, trajectory.reward) == ("completed", 1.0), trajectory.extra["program"]
    (segment,) = trajectory.segments
    requests, answers = world.client.requests, world.client.answers
    assert sampled(segment) == [token for ids in answers for token in ids]
    assert whole(segment) == [*requests[-1].token_ids, *answers[-1]]
    assert all(whole(segment)[: len(request.token_ids)] == request.token_ids for request in requests)
    assert (trajectory.num_turns, trajectory.metrics["token_mismatches"]) == (3, 0)
    assert trajectory.extra["program"]["exit_code"] == 0


@asked_of(MINI, CLAUDE, CODEX)
@pytest.mark.torch
async def test_an_agent_is_trained_for_two_steps(data: Data, tmp_path: Path, long_model: str, agent: Agent) -> None:
    """One of each two episodes repairs its package, the other one does nothing."""
    from penstock.trainer import DataConfig, TrainerConfig, TrainJob, train

    tasks = tasks_of(data, 2)
    limits = Limits(group_size=2, groups_per_step=1, max_staleness=4, lease_ttl_s=60.0)
    world = world_of(agent, data, tasks, limits, tmp_path, fails="1", more=agent.more)
    await world.queue.create_run(limits, "")
    trainer = {"steps": 2, "lr": 1e-4, "checkpoint_every": 1, "batch_timeout_s": 500.0, "micro_batch_tokens": 65_536}
    job = TrainJob(
        run=replace(world.job.run, model=long_model),
        config=TrainerConfig(**trainer),
        limits=limits,
        run_dir=tmp_path / "run",
        weights_dir=tmp_path / "weights",
        data=DataConfig(train=str(data.tasks), shuffle=False),
    )
    worker = asyncio.create_task(run_worker(world.job))
    try:
        await asyncio.wait_for(train(job), 580)
    finally:
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
    status = await world.queue.status()
    assert (status.version, status.committed_step, status.groups["committed"]) == (2, 2, 2)
    steps = [json.loads(line) for line in (tmp_path / "run/steps.jsonl").read_text().splitlines()]
    trained = [episode for step in steps for episode in step["episodes"]]
    assert sorted(trained) == [f"{task.task_id}#{member}" for task in tasks for member in range(2)]
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["reward"] for line in metrics] == [0.5, 0.5]


@asked_of(MINI, CLAUDE, CODEX)
@pytest.mark.redis
@pytest.mark.crash
async def test_killed_in_mid_episode_it_is_finished_by_another_worker_once(
    data: Data,
    tmp_path: Path,
    agent: Agent,
) -> None:
    """kill -9 of the worker between two answers. What its box held is gone with it."""
    (task,) = tasks_of(data, 1)
    config, boxes = config_of(agent)
    hold = tmp_path / "hold"
    hold.touch()
    limits = Limits(group_size=1, groups_per_step=1, max_staleness=0, lease_ttl_s=15.0, max_lost_leases=100)
    async with RedisServer(tmp_path / "redis", PASSWORD) as server:
        queue = await RedisTransferQueue.connect(server.url, "agents", TransferQueueConfig(), PASSWORD)
        await queue.create_run(limits, "{}")
        await queue.submit([task])
        given = {
            "redis_url": server.url, "run": "agents", "model": MODEL, "recipe_dir": str(tmp_path), "loop": "command",
            "lease_ttl_s": limits.lease_ttl_s, "episodes": 1, "lines": agent.says(task), "hold": str(hold),
            "settings": config.settings, "max_new_tokens": 100_000, "max_response_tokens": 200_000,
            "reward": config.reward,
            "sandbox": boxes.model_dump(include={"folders", "memory_mb", "tmp_mb", "cpu_s", "pids"}),
            "tools": [{"name": "swe", "timeout_s": 60, "settings": {"repositories": str(data.folder / "data/swe")}}],
        }  # fmt: skip
        env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}

        def worker(name: str) -> subprocess.Popen[bytes]:
            argv = [sys.executable, "-m", "tests.agent_loops.kill.worker_process", json.dumps({**given, "name": name})]
            return subprocess.Popen(argv, env=env, cwd=ROOT)

        first = worker("first")
        try:
            stage = Stage(queue, server.url, "agents", MODEL, worker)
            await stage.journaled(1, JournalKind.SAMPLED, 400)
        finally:
            first.kill()
            first.wait()
        hold.unlink()
        second = worker("second")
        try:
            (trajectory,) = await stage.finished(1, 400)
            stop(second)
        finally:
            second.kill()
            second.wait()
            await queue.close()
    assert (trajectory.reward, trajectory.num_turns, trajectory.extra["worker"]) == (1.0, 3, "second")
    assert trajectory.metrics["token_mismatches"] == 0
    assert len(trajectory.segments) == 1
