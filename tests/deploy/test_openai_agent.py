"""Agents that Penstock does not know, unmodified, train the model: the OpenAI Agents SDK over both of its APIs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from tests.deploy.conftest import REPOSITORY, LivingRun, assert_accounts_balance
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch, pytest.mark.timeout(900)]
pytest.importorskip("agents", reason="the OpenAI Agents SDK (openai-agents) is not installed")
STEPS = 2


def start_agents(run: LivingRun, port: int, api: str) -> subprocess.Popen[bytes]:
    """The recipe's own file, as its first lines say; it learns the token from the run's connect.env."""
    token = re.search(r"PENSTOCK_TOKEN=(\S+)", (run.root / "connect.env").read_text())
    assert token
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "PENSTOCK_TOKEN": token[1]}
    file = REPOSITORY / "recipes/openai_agent/agent.py"
    argv = [sys.executable, str(file), "--url", f"http://127.0.0.1:{port}", "--api", api, "--concurrency", "6"]
    with (run.root / "logs" / f"foreign-{api}.log").open("wb") as log:
        return subprocess.Popen(argv, env=environment, stdout=log, stderr=log)


def test_run_trains_on_an_unmodified_framework(start_run: Callable[..., LivingRun]) -> None:
    port = free_port()
    settings = (f"rollout.port={port}", f"trainer.steps={STEPS}", "groups_per_step=2")
    living = start_run("foreign", *settings, recipe=REPOSITORY / "recipes/openai_agent.yaml")
    living.wait_for(lambda: (living.root / "connect.env").exists() and (living.root / "logs").exists())
    agents = [start_agents(living, port, api) for api in ("chat", "responses")]
    try:
        summary = living.finish(timeout_s=600)
    finally:
        for process in agents:
            process.kill()
            process.wait()
    assert summary["steps"] == STEPS
    assert_accounts_balance(summary)
    files = sorted((living.root / "trajectories").glob("step_*.jsonl"))
    episodes = [episode for file in files for episode in living.rows(f"trajectories/{file.name}")]
    assert summary["episodes_trained"] == STEPS * 2 * 8
    assert {episode["extra"]["agent"] for episode in episodes} == {"openai client"}
    with_tools = [episode for episode in episodes if episode["metrics"]["tool_calls"] > 0]
    assert with_tools, "a model that calls its tool in 3 of 10 episodes never did"
    # Invariant 1: the turn after a tool's answer is spliced onto the ids before it.
    assert {len(episode["segments"]) for episode in with_tools} == {1}
    assert all(episode["num_turns"] >= 2 for episode in with_tools if episode["outcome"]["kind"] == "completed")
    assert any(episode["reward"] == 1.0 for episode in with_tools)
