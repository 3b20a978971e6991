"""On a real Slurm of two nodes: a run that is requeued in the middle, joined by an array, and told to stop; a trainer
over both nodes of which one half is killed; GPUs handed out."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.deploy.conftest import RECIPE, REPOSITORY, assert_accounts_balance, held_by, weights_of

from penstock.deploy import RunConnection
from penstock.transfer_queue import QueueUnavailable

pytestmark = [
    *(pytest.mark.slurm, pytest.mark.slow, pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch),
    *(pytest.mark.crash, pytest.mark.timeout(1800)),
]
SLURM_CONF = Path("/var/lib/penstock-slurm/slurm.conf")
USABLE = "(idle|mix|alloc|comp)"
SHORT = ("groups_per_step=4", "group_size=4", "data.eval_limit=16", "agent.concurrency=16", "--cpus-per-node", "1")
NEVER_SAVED = ("trainer.checkpoint_every=100",)
"""But when a job is told to stop, and at the end."""


def ask(*words: str) -> subprocess.CompletedProcess[str]:
    """Of Slurm, or of `penstock slurm`."""
    return subprocess.run(
        words, capture_output=True, text=True, timeout=120, check=False, env=environment(), cwd=REPOSITORY
    )


def slurm(*words: str) -> str:
    done = ask(*words)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout.strip()


def environment() -> dict[str, str]:
    return {**os.environ, "SLURM_CONF": str(SLURM_CONF), "PYTHONPATH": str(REPOSITORY / "src")}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> None:
    try:
        nodes = ask("sinfo", "-hNo", "%N %t")
    except FileNotFoundError:
        pytest.skip("no Slurm: scripts/setup-slurm installs one and starts it")
    if not SLURM_CONF.exists() or not re.fullmatch(f"n1 {USABLE}\nn2 {USABLE}\n", nodes.stdout):
        pytest.skip(f"scripts/setup-slurm has not started two usable nodes: {nodes.stderr.strip() or nodes.stdout}")


class SlurmRun:
    """A run in Slurm's hands, and its job."""

    def __init__(self, runs_dir: Path, name: str, *words: str) -> None:
        self.root = runs_dir / name
        self.weights_of_others = weights_of(name)
        output = self.penstock(str(RECIPE), f"name={name}", f"runs_dir={runs_dir}", "--time", "30", *words)
        self.jobs = [re.match(r"job (\d+):", output)[1]]  # type: ignore[index]

    @property
    def job(self) -> str:
        return self.jobs[0]

    def penstock(self, *words: str) -> str:
        return slurm(sys.executable, "-m", "penstock.deploy.cli", "slurm", *words)

    def state(self, job: str | None = None) -> dict[str, str]:
        text = slurm("scontrol", "show", "job", job or self.job, "--oneliner").splitlines()[0]
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def steps(self) -> int:
        metrics = self.root / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 600) -> None:
        """While the job waits or runs, or when it has ended as it should."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.state()["JobState"] in ("PENDING", "RUNNING", "COMPLETING", "COMPLETED"), self.tail()
            assert time.monotonic() < deadline, f"it took longer than {timeout_s} s:\n{self.tail()}"
            time.sleep(0.2)

    def wait_for_life(self, number: int) -> None:
        """Until the job runs again after so many restarts. Slurm lets a requeued job wait: not in a test."""

        def lives() -> bool:
            state = self.state()
            if state["JobState"] == "PENDING" and state["Reason"] == "BeginTime":
                time.sleep(2)  # a credential of the second in which the job ended counts as revoked with it
                slurm("scontrol", "update", f"jobid={self.job}", "starttime=now")
            return state["JobState"] == "RUNNING" and int(state["Restarts"]) == number

        self.wait_for(lives)

    def finish(self) -> dict[str, Any]:
        self.wait_for(lambda: self.state()["JobState"] == "COMPLETED")
        return json.loads((self.root / "summary.json").read_text())

    def processes(self) -> list[int]:
        """All that name the run's folder or its run: steps, ranks, engines, redis-server."""
        found = []
        for process in psutil.process_iter():
            try:
                words = " ".join(process.cmdline())
                mine = str(self.root) in words or process.environ().get("PENSTOCK_RUN") == self.root.name
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
            except psutil.Error:
                continue
        return found

    def tail(self) -> str:
        logs = sorted((self.root / "logs").glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)

    def assert_nothing_left(self) -> None:
        deadline = time.monotonic() + 60
        while (alive := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert [psutil.Process(pid).cmdline() for pid in alive] == []
        assert slurm("squeue", "--noheader", "--jobs", ",".join(self.jobs), "--states=PENDING,RUNNING,COMPLETING") == ""
        assert weights_of(self.root.name) <= self.weights_of_others
        assert not (self.root / "connect.env").exists()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., SlurmRun]]:
    started: list[SlurmRun] = []

    def begin(name: str, *words: str) -> SlurmRun:
        started.append(SlurmRun(tmp_path, name, *words))
        return started[-1]

    yield begin
    for run in started:
        for job in run.jobs:
            ask("scancel", job)


def servers(run: SlurmRun) -> set[str]:
    """Names in the registry of the living run's queue; none while it is on its way up."""

    async def registered() -> set[str]:
        link = RunConnection.from_lines((run.root / "connect.env").read_text())
        try:
            queue = await link.connect()
        except QueueUnavailable:
            return set()
        try:
            return {server.server_id for server in await queue.servers()}
        finally:
            await queue.close()

    return asyncio.run(registered()) if (run.root / "connect.env").exists() else set()


def test_slurm_run_completes_and_leaves_nothing(start, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    words = ("trainer.steps=2", "groups_per_step=2", "agent.workers=1", "--nodes", "2", "--sandbox-server")
    run = start("plain", *SHORT, *NEVER_SAVED, *words, *held_by(hold))
    run.wait_for(lambda: servers(run) == {"rollout-0"})
    hold.unlink()
    summary = run.finish()
    assert (summary["steps"], summary["restarts"]["trainer"]) == (2, 0)
    assert summary["staleness_max"] <= 2
    assert_accounts_balance(summary)
    assert run.state()["Restarts"] == "0"
    logs = {log.name for log in (run.root / "logs").glob("*.log")}
    assert {"slurm.log", "queue.log", "head.log", "rollout-0.log", "agent-0.log", "sandbox.log"} <= logs
    run.assert_nothing_left()


@pytest.mark.deep
def test_slurm_requeue_join_and_stop_lose_nothing(start, tmp_path: Path) -> None:
    steps, hold = 8, tmp_path / "hold"
    words = (f"trainer.steps={steps}", *held_by(hold))
    run = start("requeued", *SHORT, *words, "agent.workers=1", *NEVER_SAVED, "--nodes", "2")
    run.wait_for(lambda: run.steps() >= 1)
    hold.touch()
    slurm("scontrol", "requeue", run.job)
    run.wait_for_life(1)
    joined = run.penstock("join", str(run.root), "--array", "0", "--cpus-per-node", "1", "--time", "30")
    run.jobs.append(re.match(r"job (\d+):", joined)[1])  # type: ignore[index]
    run.wait_for(lambda: servers(run) == {"rollout-0", f"rollout-{run.jobs[1]}-0-0"})
    before = run.steps()
    hold.unlink()
    run.wait_for(lambda: run.steps() > before)
    hold.touch()  # the run must not end before SIGTERM reaches it
    # What Slurm sends before a time limit: to the batch shell alone.
    slurm("scancel", "--batch", "--signal=TERM", run.job)
    run.wait_for_life(2)
    hold.unlink()
    summary = run.finish()
    assert summary["steps"] == steps
    assert summary["staleness_max"] <= 2
    assert_accounts_balance(summary)
    lines = [json.loads(line)["step"] for line in (run.root / "metrics.jsonl").read_text().splitlines()]
    assert Counter(lines) == dict.fromkeys(range(steps), 1), (
        "each life ended with a checkpoint: no step is trained again"
    )
    run.wait_for(lambda: run.state(run.jobs[1])["JobState"] == "COMPLETED")
    run.assert_nothing_left()


@pytest.mark.deep
def test_slurm_trainer_over_two_nodes_survives_half_of_it(start, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    words = (*held_by(hold), "trainer.steps=12", "trainer.ranks=2", "agent.workers=1")
    words += ("--nodes", "2", "--trainer-nodes", "2", "--sandbox-server")
    run = start("wide", *SHORT, *NEVER_SAVED, *words)
    run.wait_for(lambda: run.steps() >= 1)
    hold.touch()
    far = [pid for pid in run.processes() if _environment(pid).get("GROUP_RANK") == "1"]
    assert far, "no rank on the second node"
    os.kill(min(far, key=lambda pid: psutil.Process(pid).create_time()), signal.SIGKILL)
    hold.unlink()
    summary = run.finish()
    assert (summary["steps"], summary["restarts"]["trainer"]) == (12, 1)
    assert_accounts_balance(summary)
    assert "trainer-1 ended with status" in (run.root / "logs" / "slurm.log").read_text()
    run.assert_nothing_left()


def test_slurm_gives_each_gpu_to_one_step(start, script_of, tmp_path: Path) -> None:
    """The script as it is, with a program in penstock's place that notes its GPUs; four in name on each node."""
    from penstock.deploy.placements.slurm.script import SlurmJob

    note = tmp_path / "note"
    note.write_text(
        f'#!/bin/bash\necho "$SLURMD_NODENAME ${{CUDA_VISIBLE_DEVICES:-none}}" >{tmp_path}/gpus-"$SLURM_JOB_NAME"\n'
        f'case "$1" in run) while [ "$(ls {tmp_path}/gpus-* | wc -l)" -lt 6 ]; do sleep 0.1; done ;;\n'
        "*) sleep 300 ;; esac\n"
    )
    note.chmod(0o755)
    job = SlurmJob(gpus_per_node=4, cpus_per_node=4, time="5")
    text = script_of("trainer.ranks=2", "rollout.servers=2", "agent.workers=2", nodes=1, job=job)
    text = re.sub(r"^penstock=.*$", f"penstock=({note})", text, flags=re.MULTILINE)
    (tmp_path / "runs" / "sums" / "logs").mkdir(parents=True)
    (tmp_path / "runs" / "sums" / "slurm").mkdir()
    for role in ("owner", "trainer", "agent", "rollout"):
        (tmp_path / "runs" / "sums" / "slurm" / f"{role}.env").touch()
    (tmp_path / "script").write_text(text)
    number = slurm("sbatch", "--parsable", str(tmp_path / "script"))
    deadline = time.monotonic() + 300
    while "JobState=COMPLETED" not in slurm("scontrol", "show", "job", number):
        assert time.monotonic() < deadline, (tmp_path / "runs" / "sums" / "logs" / "slurm.log").read_text()
        time.sleep(0.2)
    found = {path.name.removeprefix("gpus-"): path.read_text().split() for path in tmp_path.glob("gpus-*")}
    assert {node for node, _ in found.values()} == {found["head"][0]}
    given = {name: set(gpus.split(",")) for name, (_, gpus) in found.items()}
    assert len(given["head"]) == 2
    assert [len(given[name]) for name in ("rollout-0", "rollout-1")] == [1, 1]
    assert given["head"] | given["rollout-0"] | given["rollout-1"] == {"0", "1", "2", "3"}
    for name in ("queue", "agent-0", "agent-1"):
        assert given[name] == {"none"}


def _environment(pid: int) -> dict[str, str]:
    try:
        return psutil.Process(pid).environ()
    except psutil.Error:
        return {}
