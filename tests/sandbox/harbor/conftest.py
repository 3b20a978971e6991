"""Tasks of our own making, and folders that tests write."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest
import pytest_asyncio

from penstock.sandbox import Sandbox, SandboxConfig, SandboxError, make_sandbox
from penstock.sandbox.docker import build_image, has_image
from penstock.sandbox.harbor import HarborTask

TASKS = Path(__file__).parent / "tasks"
TERMINAL_BENCH = Path(__file__).parent / "terminal_bench"
LANGUAGES = "penstock-box:languages"
BOXES = SandboxConfig(
    own_root=True, max_boxes=4, memory_mb=512, tmp_mb=64, cpu_s=600, cpus=2.0, pids=128, run_timeout_s=60.0
)
REWARD = "#!/bin/bash\n{command}\n"
WriteTask = Callable[..., Path]


@pytest.fixture
def write_task(tmp_path: Path) -> WriteTask:
    """Writes a task's folder; `files` replace or add, an empty text takes away."""

    def write(
        name: str = "made",
        *,
        toml: str = "",
        test: str = "test -f /app/done && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt",
        solve: str = "touch /app/done",
        files: Mapping[str, str] | None = None,
    ) -> Path:
        folder = tmp_path / "tasks" / name
        usual = {
            "task.toml": toml,
            "instruction.md": "Make the file /app/done.\n",
            "tests/test.sh": f"#!/bin/bash\n{test}\n",
            "solution/solve.sh": f"#!/bin/bash\n{solve}\n",
        }
        for path, text in {**usual, **(files or {})}.items():
            if text or path == "task.toml":
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text)
        return folder

    return write


@pytest_asyncio.fixture
async def boxes() -> AsyncIterator[Sandbox]:
    """Bubblewrap's, with the folders that tasks write."""
    made = make_sandbox(BOXES, f"tests-{os.getpid()}")
    yield made
    await made.close()


async def require_languages() -> None:
    """Skips where there is no engine, or not the image that the tasks are built on."""
    try:
        there = await has_image(LANGUAGES)
    except SandboxError as error:
        pytest.skip(f"{error} (scripts/setup-harbor)")
    if not there:
        pytest.skip(f"{LANGUAGES} is missing: scripts/setup-harbor makes it")


async def build(task: HarborTask) -> None:
    """Without a network: every image here is one on this machine and its task's files."""
    if task.build is not None and task.image is not None and not await has_image(task.image):
        await build_image(task.image, task.build.packed(), task.build_timeout_s, "none")
