"""The commands that look into a run, on a real redis-server."""

import asyncio
import hashlib
import json
import os
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from penstock.deploy import app
from penstock.transfer_queue import (
    DataCursor,
    Limits,
    Outcome,
    OutcomeKind,
    RedisServer,
    RedisTransferQueue,
    ServerInfo,
    Task,
    TransferQueueConfig,
)
from penstock.transfer_queue.redis import RIGHTS

PASSWORD = "only-for-this-test"


@pytest.fixture
async def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RedisTransferQueue]:
    async with RedisServer(tmp_path / "redis", PASSWORD) as server:
        monkeypatch.setenv("PENSTOCK_QUEUE", server.url)
        monkeypatch.setenv("PENSTOCK_REDIS_PASSWORD", PASSWORD)
        monkeypatch.setenv("PENSTOCK_TOKEN", "token")
        queue = await RedisTransferQueue.connect(server.url, "mine", TransferQueueConfig(), password=PASSWORD)
        limits = Limits(group_size=2, groups_per_step=1, max_staleness=1, max_attempts=1)
        await queue.create_run(limits, "config: true")
        await queue.submit(
            [Task("train/0", "train", [{"role": "user", "content": "?"}], "test", "1")], cursor=DataCursor(0, 1)
        )
        yield queue
        await queue.close()


async def invoke(*words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, list(words))


async def test_version_is_that_of_the_project() -> None:
    with (Path(__file__).parents[3] / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    assert (await invoke("--version")).stdout == f"penstock {version}\n"


@pytest.mark.redis
async def test_status_is_json(queue: RedisTransferQueue) -> None:
    await queue.heartbeat(ServerInfo("s0", "http://a", 0))
    result = await invoke("queue", "status", "mine")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["groups"]["queued"], told["servers"]["s0"]["version_lag"]) == (1, told["version"])
    told = await invoke("queue", "status", "mine", "--prometheus")
    assert 'penstock_queue_groups{run="mine",state="queued"} 1.0' in told.stdout
    assert 'penstock_queue_server_version_lag{run="mine",server="s0"}' in told.stdout


@pytest.mark.redis
async def test_queue_status_finds_the_runs_folder(
    queue: RedisTransferQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    names = ("PENSTOCK_QUEUE", "PENSTOCK_REDIS_PASSWORD", "PENSTOCK_TOKEN")
    lines = "".join(f"export {name}={os.environ[name]}\n" for name in names)
    (run / "connect.env").write_text(lines + "export PENSTOCK_RUN=mine\n")
    for name in names:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    for given in ("mine", str(run)):
        result = await invoke("queue", "status", given)
        assert json.loads(result.stdout)["groups"]["queued"] == 1, result.output
    (run / "connect.env").unlink()
    (run / "summary.json").write_text('{"ended": "goal reached"}')
    told = json.loads((await invoke("queue", "status", "mine")).stdout)
    assert told == {"run": "mine", "alive": False, "ended": "goal reached"}
    result = await invoke("queue", "dead-letters", "list", "mine")
    assert (result.exit_code, "is not running" in result.stderr) == (2, True)


async def test_queue_of_an_unknown_run_names_those_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_QUEUE", "PENSTOCK_RUN"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").write_text("name: mine\n")
    monkeypatch.chdir(tmp_path)
    for words in (("queue", "status"), ("queue", "dead-letters", "list"), ("status",)):
        result = await invoke(*words, "mien")
        assert result.exit_code == 2
        assert "mien: no such run" in result.stderr, words
        assert "mine" in result.stderr.partition("no such run")[2], words


@pytest.mark.redis
async def test_dead_letters_are_listed_shown_and_requeued(queue: RedisTransferQueue) -> None:
    for lease in await queue.lease_episodes("worker", 2, 0):
        await queue.fail(lease, Outcome(OutcomeKind.INFRA_ERROR, "the box is gone", "sandbox"))
    listed = await invoke("queue", "dead-letters", "list", "mine")
    assert "train/0#1  attempts 1  sandbox: the box is gone" in listed.stdout
    shown = json.loads((await invoke("queue", "dead-letters", "show", "train/0#1", "mine")).stdout)
    assert shown["outcome"]["component"] == "sandbox"
    assert (await invoke("queue", "dead-letters", "show", "train/9#1", "mine")).exit_code == 1
    assert (await invoke("queue", "dead-letters", "requeue", "train/0#1", "mine")).exit_code == 0
    assert (await queue.status()).groups["queued"] == 1


@pytest.mark.redis
async def test_drop_deletes_the_run(queue: RedisTransferQueue) -> None:
    assert (await invoke("queue", "drop", "mine")).exit_code == 1, "without --yes a person is asked"
    assert "keys deleted" in (await invoke("queue", "drop", "mine", "--yes")).stdout
    result = await invoke("agent", "--name", "a", "--run", "mine")
    assert result.exit_code != 0


async def test_acl_prints_users_for_ones_own_redis() -> None:
    result = await invoke("queue", "acl", "mine")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split()[2] for line in lines] == [f"mine-{role}" for role in RIGHTS]
    for line, login in zip(lines, result.stderr.splitlines(), strict=True):
        password = login.partition("PENSTOCK_REDIS_PASSWORD=")[2]
        assert f"#{hashlib.sha256(password.encode()).hexdigest()}" in line.split()
    assert (await invoke("queue", "acl", "a*")).exit_code == 2


async def test_a_role_without_its_secrets_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_QUEUE", "PENSTOCK_RUN", "PENSTOCK_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    result = await invoke("agent", "--name", "a")
    assert result.exit_code == 2
    assert "--queue or PENSTOCK_QUEUE is not set" in result.stderr
    result = await invoke("agent", "--name", "a", "--queue", "redis://127.0.0.1:1", "--run", "r")
    assert "PENSTOCK_TOKEN is not set" in result.stderr


async def test_generated_problems_become_parquet(tmp_path: Path) -> None:
    result = await invoke("data", "calculator", "--out", str(tmp_path), "--train", "8", "--eval", "4")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "train.parquet").exists()
    assert "4 problems" in result.stdout


async def test_bad_gsm8k_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "test.jsonl").write_text("not json\n")
    result = await invoke("data", "gsm8k-equations", "--input", str(tmp_path), "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "test.jsonl" in result.stderr


async def test_benchmarks_are_named() -> None:
    assert "queue" in (await invoke("bench", "list")).stdout
    result = await invoke("bench", "nonsense")
    assert result.exit_code == 2
    assert "there are:" in result.stderr
