"""The main function of a role: signals, heartbeat, refused jobs, and one trainer per run; real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.conftest import RECIPE, REPOSITORY
from tests.until import until

from penstock.deploy import RunConnection, RunDir, load_config
from penstock.deploy.run.connection import limits_of
from penstock.deploy.run.plan import Rendezvous
from penstock.deploy.run.roles import (
    FatalError,
    TrainerAlive,
    run_role,
    seed_of_server,
    sole_trainer,
    train_rank,
    turn_of,
)
from penstock.testing import MemoryTransferQueue

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
ROLE = """
import asyncio, sys
from penstock.deploy.run.roles import run_role

async def main():
    print("up", flush=True)
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        print("saving", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await asyncio.sleep(0)
        print("saved", flush=True)
        raise

run_role(main)
"""
REFUSES = """
from penstock.deploy.run.roles import fatal, run_role

async def main():
    with fatal(ValueError, OSError):
        {cause}

run_role(main)
"""
LEAVES = """
import asyncio, sys
from penstock.deploy.run.roles import run_role

async def leave():
    sys.exit("done")

async def main():
    ends = await asyncio.gather(leave(), return_exceptions=True)
    print(*map(repr, ends))

run_role(main)
"""
TRAINER = """
import asyncio, pathlib, sys
from penstock.deploy import RunDir
from penstock.deploy.run.roles import sole_trainer
async def hold():
    async with sole_trainer(RunDir(pathlib.Path(sys.argv[1]))):
        print("held", flush=True)
        await asyncio.sleep(600)
asyncio.run(hold())
"""


@pytest.mark.parametrize(
    ("cause", "traced"), [("raise ValueError('no such model')", False), ("open('/no such file')", True)]
)
def test_a_refused_job_is_one_sentence(cause: str, *, traced: bool, tmp_path: Path) -> None:
    stop_file = tmp_path / "why.stop"
    argv, env = (
        [sys.executable, "-c", REFUSES.format(cause=cause)],
        {**ENVIRONMENT, "PENSTOCK_STOP_FILE": str(stop_file)},
    )
    role = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert role.returncode == 1
    assert ("Traceback" in role.stderr) == traced, role.stderr
    assert stop_file.read_text().strip() in role.stderr


def test_a_task_that_leaves_the_process_ends_alone() -> None:
    argv = [sys.executable, "-c", LEAVES]
    role = subprocess.run(argv, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
    assert (role.stdout, role.returncode) == ("SystemExit('done')\n", 0), role.stderr
    assert "sys.exit" in role.stderr


@pytest.mark.torch
async def test_a_trainer_whose_checkpoints_are_gone_is_not_started_again(tmp_path: Path) -> None:
    rows = tmp_path / "train.jsonl"
    row = {"prompt": [{"role": "user", "content": "4?"}], "data_source": "calculator"}
    rows.write_text(json.dumps({**row, "reward_model": {"ground_truth": "4"}}) + "\n")
    settings = [f"runs_dir={tmp_path}", "name=mine", "trainer.sinks=[]", f"data.train={rows}", "data.eval=null"]
    config = load_config(RECIPE, settings)
    RunDir.of(config).root.mkdir(parents=True)
    queue = MemoryTransferQueue()
    await queue.create_run(limits_of(config), "")
    queue.join_training(await queue.claim_training("an earlier trainer"))
    await queue.commit(2, {0: [], 1: []})

    class Link(RunConnection):
        async def join(self, **_: Any) -> Any:
            return queue, config

    with pytest.raises(FatalError, match="holds no whole checkpoint"):
        await train_rank(Link("", "mine", None, "a token"))


@pytest.mark.parametrize("more", [0, 2])
def test_a_second_term_does_not_cut_off_the_first(more: int) -> None:
    argv, pipe = [sys.executable, "-c", ROLE], subprocess.PIPE
    role = subprocess.Popen(argv, env=ENVIRONMENT, stdin=pipe, stdout=pipe, text=True)
    assert role.stdout is not None
    assert role.stdout.readline() == "up\n"
    role.send_signal(signal.SIGTERM)
    assert role.stdout.readline() == "saving\n"
    for _ in range(more):
        role.send_signal(signal.SIGTERM)
    rest, _ = role.communicate("go on\n", timeout=60)
    assert (rest, role.returncode) == ("saved\n", 0)


WORKS = """
import asyncio, time
from penstock.deploy.run.roles import run_role

async def main():
    while time.process_time() < 1.2: pass  # CPU time: load does not change it; the kernel counts in ticks
    print("up", flush=True)
    await asyncio.sleep(600)

run_role(main)
"""
HEAD = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"


@pytest.mark.crash
async def test_a_role_that_outlives_its_head_notes_what_it_used(tmp_path: Path) -> None:
    more = {
        "PENSTOCK_SUPERVISED": "1",
        "PENSTOCK_LIFE": "a life",
        "PENSTOCK_STOP_FILE": str(tmp_path / "rollout-0.stop"),
    }
    argv, env = [sys.executable, "-c", HEAD, sys.executable, "-c", WORKS], {**ENVIRONMENT, **more}
    with subprocess.Popen(argv, env={**env, "CUDA_VISIBLE_DEVICES": ""}, stdout=subprocess.PIPE, text=True) as head:
        assert head.stdout is not None
        assert head.stdout.readline() == "up\n"
        head.kill()
        assert head.stdout.read() == ""  # the role has ended
    (line,) = map(json.loads, (tmp_path / "rollout-0.end").read_text().splitlines())
    assert line["life"] == "a life"
    assert line["device_s"] >= 1.0


def test_a_role_that_its_head_ends_notes_nothing(tmp_path: Path) -> None:
    env = {**ENVIRONMENT, "PENSTOCK_SUPERVISED": "1", "PENSTOCK_STOP_FILE": str(tmp_path / "rollout-0.stop")}
    with subprocess.Popen([sys.executable, "-c", WORKS], env=env, stdout=subprocess.PIPE, text=True) as role:
        assert role.stdout is not None
        assert role.stdout.readline() == "up\n"
        role.terminate()
    assert role.returncode == 0
    assert not list(tmp_path.iterdir())


def test_the_heartbeat_lasts_as_long_as_the_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "beat"
    monkeypatch.setattr("penstock.deploy.run.roles.HEARTBEAT_S", 0.01)
    monkeypatch.setenv("PENSTOCK_HEARTBEAT", str(file))

    async def role() -> None:
        for _ in range(3):
            await until(file.exists)
            file.unlink()

    run_role(role)
    file.unlink(missing_ok=True)
    time.sleep(0.1)  # only time shows that nothing touches it any more
    assert not file.exists()
    monkeypatch.delenv("PENSTOCK_HEARTBEAT")
    monkeypatch.chdir(tmp_path)
    run_role(lambda: asyncio.sleep(0.05))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "level"),
    [
        ("rollout.engine=vllm", 2),
        ("rollout.engine=sglang", 1),
        ("", 1),
        ("rollout.engine=vllm placement.sleep_level=1", 1),
    ],
)
def test_an_engine_that_loads_a_new_version_after_its_sleep_keeps_no_copy(words: str, level: int) -> None:
    turn = turn_of(load_config(RECIPE, ["placement.colocated=true", *words.split()]))
    assert turn is not None
    assert turn.sleep_level == level


@pytest.mark.parametrize("rendezvous", [Rendezvous(), Rendezvous(2, 1, "127.0.0.1:1")])
def test_torchrun_leaves_no_folder_of_its_own(rendezvous: Rendezvous, tmp_path: Path) -> None:
    words = rendezvous.arguments(2, "run", tmp_path)
    assert words[words.index("--log-dir") + 1].startswith(str(tmp_path))


def test_each_server_samples_with_its_own_seed() -> None:
    names = [f"rollout-{number}" for number in range(64)] + ["rollout-eval"]
    seeds = [seed_of_server(7, name) for name in names]
    assert len(set(seeds)) == len(names)
    assert seeds == [seed_of_server(7, name) for name in names], "a restarted server is the same one"
    assert all(0 <= seed < 1 << 31 for seed in seeds), "engines take a signed number"
    assert seed_of_server(8, "rollout-0") != seeds[0]


async def test_the_next_trainer_starts_after_the_death_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [sys.executable, "-c", TRAINER, str(tmp_path)]
    trainer = subprocess.Popen(argv, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout is not None
        assert await asyncio.to_thread(trainer.stdout.readline) == "held\n"
        with pytest.raises(TrainerAlive, match=str(tmp_path)):
            async with sole_trainer(RunDir(tmp_path), wait_s=0.1):
                pass
        with monkeypatch.context() as patch:
            patch.setenv("RANK", "1")  # another rank of the same trainer
            async with sole_trainer(RunDir(tmp_path), wait_s=0.0):
                pass
    finally:
        trainer.kill()
        trainer.wait()
    async with asyncio.timeout(60), sole_trainer(RunDir(tmp_path)):
        assert (tmp_path / "trainer.lock").exists()
