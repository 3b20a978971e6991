"""Whole runs of the calculator recipe, as a person would start them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.living import alive, living_below

REPOSITORY = Path(__file__).parents[2]
RECIPE = REPOSITORY / "recipes" / "calculator.yaml"
SMALL = ("groups_per_step=2", "group_size=4", "data.eval_limit=8", "trainer.checkpoint_every=2", "agent.workers=1")
HELD_LOOP = """
import asyncio
from pathlib import Path

from penstock.agent_loops.loops import ToolAgentLoop


class HeldLoop(ToolAgentLoop):
    async def run(self, task):
        while Path({hold!r}).exists():
            await asyncio.sleep(0.2)
        return await super().run(task)
"""


class LivingRun:
    """A `penstock run` in a separate process, and its parts by role."""

    def __init__(
        self,
        runs_dir: Path,
        name: str,
        *overrides: str,
        resume: bool = False,
        cwd: Path | None = None,
        recipe: Path = RECIPE,
    ) -> None:
        self.root = runs_dir / name
        self.weights_of_others = weights_of(name)
        self.started: dict[int, float] = {}
        """Start time of each process seen: its number may be another's by the end."""
        self.log = runs_dir / f"{name}.log"
        argv = [sys.executable, "-m", "penstock.deploy.cli", "run", str(recipe), f"name={name}", f"runs_dir={runs_dir}"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*argv, *overrides, *(["--resume"] if resume else [])],
                stdout=log,
                stderr=log,
                cwd=cwd or REPOSITORY,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
            )

    def pids(self, *words: str) -> list[int]:
        """Living descendants whose command line holds all the words."""
        found = living_below(self.process.pid, *words)
        for process in found:
            with suppress(psutil.Error):
                self.started[process.pid] = process.create_time()
        return [process.pid for process in found]

    def kill_one(self, *words: str) -> int:
        """Returns when those below it are gone too: one that ends with its parent is not taken for the next one."""
        pid = self.pids(*words)[0]
        below = living_below(pid)
        os.kill(pid, signal.SIGKILL)
        self.wait_for(lambda: not any(alive(one.pid) for one in below))
        return pid

    def rows(self, name: str) -> list[dict[str, Any]]:
        file = self.root / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def steps(self) -> int:
        metrics = self.root / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 600) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the run ended early:\n{self.tail()}"
            assert time.monotonic() < deadline, f"it took longer than {timeout_s} s:\n{self.tail()}"
            time.sleep(0.1)

    def finish(self, timeout_s: float = 900) -> dict[str, Any]:
        status = self.process.wait(timeout_s)
        assert status == 0, f"exit status {status}:\n{self.tail()}"
        return self.summary()

    def summary(self) -> dict[str, Any]:
        return json.loads((self.root / "summary.json").read_text())

    def tail(self) -> str:
        logs = [self.log, *sorted((self.root / "logs").glob("*.log"))]
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-2500:]}" for file in logs)


def assert_accounts_balance(summary: dict[str, Any]) -> None:
    """Invariants 1 to 3 as a run's summary states them."""
    wrong = {name: summary[name] for name in ("trained_twice", "lost", "token_mismatches", "episodes_failed")}
    assert not any(wrong.values()), wrong


def held_by(hold: Path) -> tuple[str, str]:
    """Settings of the recipe's loop that waits as long as the file `hold` exists."""
    loop = hold.with_name("held_loop.py")
    loop.write_text(HELD_LOOP.format(hold=str(hold)))
    return f"agent.loop={loop}:HeldLoop", "agent.episode_deadline_s=1200"


def weights_of(name: str) -> set[Path]:
    """Folders of published weights of runs with this name on this machine, killed ones of another day included."""
    return set(Path("/dev/shm").glob(f"penstock-{name}-*"))


def assert_nothing_left(run: LivingRun, pids: list[int]) -> None:
    """Every process that the run started is gone (a zombie not yet reaped counts as gone), its shared memory too."""
    deadline = time.monotonic() + 60
    while (left := [pid for pid in pids if alive(pid, run.started.get(pid))]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == [], [process for process in psutil.process_iter(["ppid", "cmdline"]) if process.pid in left]
    assert weights_of(run.root.name) <= run.weights_of_others


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Callable[..., LivingRun]]:
    started: list[LivingRun] = []

    def start(name: str, *overrides: str, **options: Any) -> LivingRun:
        started.append(LivingRun(tmp_path, name, *overrides, **options))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
            try:
                run.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(run.process.pid, signal.SIGKILL)
