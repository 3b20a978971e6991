"""A run has an identity and one head: strangers and second heads are refused, a dead head is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.conftest import RECIPE

from penstock.common import process_has_ended, process_identity
from penstock.deploy import RunConfig, RunConnection, RunDir, load_config
from penstock.deploy.config import dump_config
from penstock.deploy.run.connection import connect_file
from penstock.deploy.run.head_lease import HeadLease, HeadTaken
from penstock.deploy.run.identity import changed_settings, dataset_digests, describe_found, identity_of
from penstock.deploy.run.launcher import _with_files, launch
from penstock.testing import MemoryTransferQueue
from penstock.trainer import DataConfig
from penstock.transfer_queue import Limits, RedisServer, RunTaken, TransferQueueConfig

LIMITS = Limits(group_size=2, groups_per_step=1, max_staleness=1)
NAMES_ITSELF = "from penstock.common import process_identity; print(process_identity(), flush=True); input()"


@pytest.fixture
async def queue() -> MemoryTransferQueue:
    queue = MemoryTransferQueue()
    await queue.create_run(LIMITS, "")
    return queue


@pytest.fixture
def mine(tmp_path: Path) -> tuple[RunConfig, RunDir]:
    return run_in(tmp_path)


def run_in(folder: Path) -> tuple[RunConfig, RunDir]:
    config = load_config(RECIPE, [f"runs_dir={folder}", "name=mine"])
    run = RunDir.of(config)
    run.root.mkdir(parents=True)
    return config, run


def lease(queue: MemoryTransferQueue, holder: str, ttl_s: float = 30.0) -> HeadLease:
    lease = HeadLease(queue, ttl_s=ttl_s, renew_s=0.01, poll_s=0.01)
    lease.holder = holder
    return lease


def test_the_date_of_templates_is_that_of_the_first_start(mine: tuple[RunConfig, RunDir]) -> None:
    config, run = mine
    before = date.today()
    first = _with_files(config, run)
    assert before <= first.agent.date <= date.today()
    dated = config.model_copy(update={"agent": config.agent.model_copy(update={"date": date(2001, 2, 3)})})
    run.config.write_text(dump_config(_with_files(dated, run)))
    assert _with_files(config, run).agent.date == date(2001, 2, 3)


async def test_a_second_head_is_refused_with_the_name_of_the_first(queue: MemoryTransferQueue) -> None:
    first = lease(queue, "first")
    await first.claim()
    keeping = asyncio.create_task(first.keep())
    with pytest.raises(HeadTaken, match="first heads this run"):
        async with asyncio.timeout(60):
            await lease(queue, "second").claim()
    keeping.cancel()


async def test_a_silent_head_is_replaced_and_ends(queue: MemoryTransferQueue) -> None:
    first = lease(queue, "first", ttl_s=0.1)
    await first.claim()
    async with asyncio.timeout(60):
        await lease(queue, "second").claim()
        with pytest.raises(HeadTaken, match="second has taken this run over"):
            await first.keep()


@pytest.mark.redis
async def test_a_launch_is_refused_beside_a_living_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two machines that share the run's folder, where the lock of the first has lapsed."""
    names, leading, over = iter(("first", "second")), asyncio.Event(), asyncio.Event()

    async def run_roles(*_: Any, **__: Any) -> None:
        assert not leading.is_set(), "two heads run the roles"
        leading.set()
        await over.wait()

    monkeypatch.setattr("penstock.deploy.run.launcher._run_roles", run_roles)
    monkeypatch.setattr("penstock.deploy.run.launcher.RunLock", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr("penstock.deploy.run.head_lease.process_identity", lambda: next(names))  # as in two processes
    monkeypatch.setitem(HeadLease.__init__.__kwdefaults__, "renew_s", 0.05)
    monkeypatch.setitem(HeadLease.__init__.__kwdefaults__, "poll_s", 0.05)
    monkeypatch.setenv("PENSTOCK_REDIS_PASSWORD", "a-test-password")
    (tmp_path / "same").mkdir()
    async with RedisServer(tmp_path / "redis", "a-test-password") as server, asyncio.timeout(60):
        queue = TransferQueueConfig(url=server.url)
        data = DataConfig(train="t")
        config = RunConfig(name="same", model="m", data=data, runs_dir=str(tmp_path), transfer_queue=queue)
        first = asyncio.create_task(launch(config))
        waiting = asyncio.create_task(leading.wait())
        await asyncio.wait((first, waiting), return_when=asyncio.FIRST_COMPLETED)
        assert leading.is_set(), first
        with pytest.raises(HeadTaken, match=r"\(first\) heads this run"):
            await launch(config)
        assert not first.done()
        over.set()
        await first


def test_a_changed_password_is_not_reported(mine: tuple[RunConfig, RunDir]) -> None:
    config, run = mine
    before, now = (
        config.model_copy(update={"transfer_queue": TransferQueueConfig(url=f"redis://:{password}@{host}:1")})
        for password, host in (("secret", "a"), ("newer", "b"))
    )
    run.write_config(before)
    assert changed_settings(run, now) == ["transfer_queue.url: redis://a:1 → redis://b:1"]


async def test_a_head_that_died_here_is_replaced_at_once(queue: MemoryTransferQueue) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", NAMES_ITSELF], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        identity = process.stdout.readline().strip()
        assert not process_has_ended(identity)
        process.kill()
    assert process_has_ended(identity)
    await queue.claim_head(f"this machine, process {process.pid} ({identity})", 3600.0)
    async with asyncio.timeout(60):
        await HeadLease(queue).claim()


def test_a_process_of_another_machine_is_not_judged() -> None:
    boot, namespace, pid, start = process_identity().split(":")
    assert not process_has_ended(f"another-boot:{namespace}:{pid}:{start}")
    assert not process_has_ended(f"{boot}:1:{pid}:{start}")
    assert not process_has_ended("no identity at all")
    assert process_has_ended(f"{boot}:{namespace}:{pid}:0"), "the pid is another process now"


async def test_a_recipe_does_not_enter_the_run_of_another(tmp_path: Path) -> None:
    queue, runs = MemoryTransferQueue(), [run_in(tmp_path / folder) for folder in "ab"]
    first, second = (identity_of(*run) for run in runs)
    assert identity_of(*runs[0]) == first, "the id stays with the folder"
    await queue.create_run(LIMITS, "config of a", first)
    with pytest.raises(RunTaken, match=rf"{first.run_id}.*{second.run_id}"):
        await queue.create_run(LIMITS, "config of b", second)


def test_a_kill_leaves_a_whole_id_or_none(mine: tuple[RunConfig, RunDir], monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(_descriptor: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("penstock.common.files.os.fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            identity_of(*mine)
    assert not mine[1].identity.exists()
    assert len(identity_of(*mine).run_id) == 16


def test_a_head_takes_only_its_own_connect_file_away(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with connect_file(RunConnection("redis://first", "mine", None, "token"), run):
        assert "redis://first" in run.connect_env.read_text()
        assert run.connect_env.stat().st_mode & 0o777 == 0o600
        run.connect_env.write_text("of the head that has taken the run over")
    assert run.connect_env.exists()
    run.connect_env.unlink()
    with connect_file(RunConnection("redis://first", "mine", None, "token"), run):
        pass
    assert not run.connect_env.exists()


async def test_resume_names_the_run_in_the_queue(mine: tuple[RunConfig, RunDir]) -> None:
    queue, (before, run) = MemoryTransferQueue(), mine
    after = before.model_copy(update={"seed": before.seed + 1})
    identity, changed = identity_of(before, run), identity_of(after, run)
    assert await queue.create_run(LIMITS, "", identity) is None
    assert "new in this queue" in describe_found(None, await queue.status(), identity)
    run.write_config(before)
    for now, config in ((identity, before), (changed, after)):
        changes = changed_settings(run, config)
        line = describe_found(await queue.create_run(LIMITS, "", now), await queue.status(), now, changes)
        for name in (identity.run_id, "0 steps", "begun"):
            assert name in line
        assert (f"seed: {before.seed} → {after.seed}" in line, "rows come in another order" in line) == (
            now is changed,
            now is changed,
        )


async def test_rows_that_were_edited_between_lives_are_named(
    queue: MemoryTransferQueue, mine: tuple[RunConfig, RunDir], tmp_path: Path
) -> None:
    before, run = mine
    train, other = tmp_path / "train.jsonl", tmp_path / "other.jsonl"
    train.write_text('{"row": 1}\n')
    other.write_text('{"row": 2}\n')
    config = before.model_copy(update={"data": before.data.model_copy(update={"train": str(train), "eval": None})})
    run.write_config(config)
    run.datasets.write_text(json.dumps(dataset_digests(config)))
    assert changed_settings(run, config, dataset_digests(config)) == []
    train.write_text('{"row": 2}\n')
    changes = changed_settings(run, config, dataset_digests(config))
    assert changes == ["data.train: edited since"]
    identity = identity_of(config, run)
    await queue.create_run(LIMITS, "", identity)
    record = await queue.create_run(LIMITS, "", identity)
    assert "rows come in another order" in describe_found(record, await queue.status(), identity, changes)
    moved = config.model_copy(update={"data": config.data.model_copy(update={"train": str(other)})})
    assert changed_settings(run, moved, dataset_digests(moved)) == [f"data.train: {train} → {other}"]


def test_a_moved_folder_is_no_change_and_each_changed_key_is_named(mine: tuple[RunConfig, RunDir]) -> None:
    before, run = mine
    code = run.root.parent / "game.py"
    code.write_text("class Game: ...")
    data = before.data.model_copy(update={"train": f"{run.data}/train.jsonl"})
    agent = before.agent.model_copy(update={"loop": f"{code}:Game"})
    run.write_config(before.model_copy(update={"data": data, "agent": agent}))
    new = run.root.parent / "elsewhere" / "mine"
    new.parent.mkdir()
    moved = RunDir(run.root.rename(new))
    moved.data.mkdir()
    (moved.data / "train.jsonl").touch()
    config = load_config(moved.config)
    assert (RunDir.of(config).root, config.data.train) == (new, f"{new}/data/train.jsonl")
    assert config.agent.loop == f"{code}:Game"
    assert changed_settings(moved, config) == []
    trainer = config.trainer.model_copy(update={"lr": 0.5})
    code.write_text("class Game(object): ...")
    changes = changed_settings(moved, config.model_copy(update={"trainer": trainer}))
    assert changes == [f"trainer.lr: {config.trainer.lr} → 0.5", f"{code}: edited since"]
    code.unlink()
    assert load_config(moved.config).agent.loop == f"{moved.code}{code}:Game"
