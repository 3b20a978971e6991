"""Two recipes on Harbor tasks in containers (docs/from/environments.md); a scripted model solves every second one."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.sandbox.harbor.conftest import LANGUAGES, TASKS, build, require_languages

from penstock.agent_loops import AgentConfig, WorkerJob, run_worker
from penstock.agent_loops.chat import chat_of, load_tokenizer
from penstock.datasets import materialise
from penstock.deploy import load_config
from penstock.rollout_server import GenerateRequest, Generation
from penstock.sandbox.harbor import tasks_of
from penstock.testing import FakeClient, MemoryTransferQueue
from penstock.trainer import load_rows
from penstock.transfer_queue import Archive, Limits, RunContext, Task

pytestmark = [pytest.mark.harbor, pytest.mark.docker, pytest.mark.deep, pytest.mark.recipes, pytest.mark.torch]
ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / "recipes/calculator/model")
MINI = ROOT / ".agents/mini"
PROGRAM = """
import json, os, subprocess, sys, urllib.request

messages = [{"role": "user", "content": sys.argv[1]}]
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
for _ in range(6):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    said = json.load(urllib.request.urlopen(asked, timeout=120))["choices"][0]["message"]["content"]
    if not said.startswith("RUN "):
        break
    done = subprocess.run(["sh", "-c", said[4:]], capture_output=True, text=True)
    messages.append({"role": "assistant", "content": said})
    messages.append({"role": "user", "content": "RESULT " + done.stdout + done.stderr})
"""
Says = Callable[[str], list[str]]
"""Shell text → the answers that run it and end."""


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Script(FakeClient):
    """Says line n of an episode after n results; member 1 of each group does nothing."""

    def __init__(self, says: Says, solutions: Mapping[str, str], mark: str) -> None:
        super().__init__(lambda context: [])
        self.chat = chat_of(MODEL, AgentConfig())
        self._says, self._solutions, self._mark = says, solutions, mark

    async def generate(self, request: GenerateRequest) -> Generation:
        task, _, member = request.episode_id.rpartition("#")
        lines = self._says(self._solutions[task] if member == "0" else "true")
        line = lines[min(self.chat.decode(request.token_ids).count(self._mark), len(lines) - 1)]
        ids = [*self.chat.encode(line), self.chat.turn_end_id]
        return Generation(ids, [-0.5] * len(ids), [(0, 0, len(ids))], "stop")


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random weights with room for an agent's prompt, and the tokenizer of `MODEL`."""
    from tests.tiny_model import save_tiny_model

    folder = tmp_path_factory.mktemp("long-model")
    tokenizer = load_tokenizer(MODEL)
    save_tiny_model(folder, vocab_size=len(tokenizer), max_position_embeddings=32_768)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """Two of the ten tasks, their images built."""
    await require_languages()
    for name in ("hello-file", "python-fix"):
        shutil.copytree(TASKS / name, tmp_path / "tasks" / name)
    for task in tasks_of(tmp_path / "tasks"):
        await build(task)
    return tmp_path / "tasks"


AGENTS: Mapping[str, tuple[str, Mapping[str, Any], Says, str]] = {
    "tools": ("tools.yaml", {}, lambda shell: [call("shell", command=shell), call("submit")], "<tool_response>"),
    "a program": (
        "agent.yaml",
        {"settings": {"command": ["python3", "{home}/agent.py", "{prompt}"], "files": {"~/agent.py": PROGRAM}}},
        lambda shell: [f"RUN {shell}", "Done."],
        "RESULT ",
    ),
    "mini-swe-agent": (
        "agent.yaml",
        {},
        lambda shell: [call("bash", command=shell), call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")],
        "<tool_response>",
    ),
}


@pytest.mark.parametrize(
    "agent",
    [
        "tools",
        "a program",
        pytest.param(
            "mini-swe-agent",
            marks=[
                pytest.mark.agents,
                pytest.mark.skipif(not MINI.exists(), reason="mini-swe-agent is missing: scripts/setup-agents mini"),
            ],
        ),
    ],
)
async def test_an_agent_is_trained_for_two_steps(agent: str, folder: Path, tmp_path: Path, long_model: str) -> None:
    from penstock.trainer import DataConfig, TrainerConfig, TrainJob, train

    file, changes, says, mark = AGENTS[agent]
    recipe = load_config(ROOT / "recipes/harbor" / file)
    config = recipe.agent.model_copy(
        update={**changes, "concurrency": 2, "max_new_tokens": 4000, "max_response_tokens": 16_000}
    )
    boxes = {"backend": "docker", "image": LANGUAGES, "max_boxes": 2, "memory_mb": 1024, "run_timeout_s": 60.0}
    folders = {"/agents": str(MINI)} if agent == "mini-swe-agent" else {}
    sandbox = recipe.sandbox.model_copy(update={**boxes, "folders": folders})
    data = materialise(f"harbor:{folder}", tmp_path / "data")
    rows = load_rows(data)
    tasks: list[Task] = [row.task(f"train/0000/{number:08d}", "train") for number, row in enumerate(rows)]
    solutions = {
        task.task_id: (Path(str(task.extra_info["harbor_task"])) / "solution/solve.sh").read_text() for task in tasks
    }
    limits = Limits(group_size=2, groups_per_step=1, max_staleness=4, lease_ttl_s=60.0)
    queue = MemoryTransferQueue(archive=Archive(tmp_path / "batches"))
    await queue.create_run(limits, "")
    run = RunContext(queue, MODEL, lease_ttl_s=limits.lease_ttl_s)
    worker_job = WorkerJob("harbor", run, config, Script(says, solutions, mark), recipe.tools, sandbox)
    trainer = {"steps": 2, "lr": 1e-4, "checkpoint_every": 1, "batch_timeout_s": 500.0, "micro_batch_tokens": 32_768}
    job = TrainJob(
        run=replace(run, model=long_model),
        config=TrainerConfig(**trainer),
        limits=limits,
        run_dir=tmp_path / "run",
        weights_dir=tmp_path / "weights",
        data=DataConfig(train=data, shuffle=False),
    )
    worker = asyncio.create_task(run_worker(worker_job))
    try:
        await asyncio.wait_for(train(job), 580)
    finally:
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
    status = await queue.status()
    assert (status.version, status.committed_step, status.groups["committed"]) == (2, 2, 2)
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["reward"] for line in metrics] == [0.5, 0.5]
