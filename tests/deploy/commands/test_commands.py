"""The commands that look into a run, on a real redis-server."""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import penstock
from penstock.deploy import RunConnection, app
from penstock.deploy.commands.shared import folder_of_run, recipe_or_run, run_or_path
from penstock.deploy.run.connection import INTERACTIVE
from penstock.transfer_queue import (
    DataCursor,
    Limits,
    NoSuchRun,
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


def test_ctrl_c_while_the_commands_are_imported_leaves_no_traceback() -> None:
    code = "import penstock.deploy.cli; raise KeyboardInterrupt"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.stderr, ended.returncode) == ("interrupted\n", -signal.SIGINT)


def test_dashboard_of_a_run_names_the_folder_that_holds_it(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.yaml").touch()
    assert "is a file" in CliRunner().invoke(app, ["dashboard", str(tmp_path / "mine/config.yaml")]).stderr
    refused = CliRunner().invoke(app, ["dashboard", str(tmp_path / "mine")])
    assert refused.exit_code == 2
    assert f"is a run; give the folder that holds it: penstock dashboard {tmp_path}" in refused.stderr


@pytest.mark.parametrize("words", ["agent", "rollout", "train", "queue status"])
def test_a_queue_that_is_not_a_url_is_refused_by_its_variable(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"QUEUE": "nonsense", "RUN": "mine", "TOKEN": "token"}.items():
        monkeypatch.setenv(f"PENSTOCK_{name}", value)
    refused = CliRunner().invoke(app, words.split())
    assert refused.exit_code == 2
    assert refused.stderr.startswith("--queue or PENSTOCK_QUEUE: Redis URL must specify")


@pytest.fixture
async def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RedisTransferQueue]:
    async with RedisServer(tmp_path / "redis", PASSWORD) as server:
        monkeypatch.setenv("PENSTOCK_QUEUE", server.url)
        monkeypatch.setenv("PENSTOCK_REDIS_PASSWORD", PASSWORD)
        monkeypatch.setenv("PENSTOCK_TOKEN", "token")
        # This one is there: on a busy machine it may answer late.
        monkeypatch.setattr("penstock.deploy.commands.queue.INTERACTIVE", TransferQueueConfig())
        queue = await RedisTransferQueue.connect(server.url, "mine", TransferQueueConfig(), password=PASSWORD)
        await queue.create_run(Limits(group_size=2, groups_per_step=1, max_staleness=1, max_attempts=1), "config: true")
        task = Task("train/0", "train", [{"role": "user", "content": "?"}], "test", "1")
        await queue.submit([task], cursor=DataCursor(0, 1))
        yield queue
        await queue.close()


async def invoke(*words: str, code: int = 0) -> Result:
    result = await asyncio.to_thread(CliRunner().invoke, app, list(words))
    assert result.exit_code == code, result.output
    return result


async def test_version_is_that_of_the_project() -> None:
    assert (await invoke("--version")).stdout == f"penstock {penstock.__version__}\n"


@pytest.mark.redis
async def test_status_is_json_or_for_prometheus(queue: RedisTransferQueue) -> None:
    await queue.heartbeat(ServerInfo("s0", "http://a", 0))
    status = json.loads((await invoke("queue", "status", "mine")).stdout)
    assert (status["groups"]["queued"], status["servers"]["s0"]["version_lag"]) == (1, status["version"])
    text = (await invoke("queue", "status", "mine", "--prometheus")).stdout
    assert 'penstock_queue_groups{run="mine",state="queued"} 1.0' in text
    assert 'penstock_queue_server_version_lag{run="mine",server="s0"}' in text


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
        assert json.loads((await invoke("queue", "status", given)).stdout)["groups"]["queued"] == 1
    (run / "connect.env").unlink()
    (run / "summary.json").write_text('{"ended": "goal reached"}')
    summary = json.loads((await invoke("queue", "status", "mine")).stdout)
    assert summary == {"run": "mine", "alive": False, "ended": "goal reached"}
    assert "is not running" in (await invoke("queue", "drop", "mine", "--yes", code=2)).stderr
    letters = ("queue", "dead-letters")
    assert (await invoke(*letters, "list", "mine")).stdout == ""
    letter = {"episode": "train/0#1", "attempts": 3, "component": "sandbox", "reason": "gone", "journal": []}
    (run / "dead_letters.jsonl").write_text(json.dumps(letter) + "\n")
    assert (await invoke(*letters, "list", "mine")).stdout == "train/0#1  attempts 3  sandbox: gone\n"
    assert json.loads((await invoke(*letters, "show", "train/0#1", "mine")).stdout) == letter
    await invoke(*letters, "show", "train/9#1", "mine", code=1)


@pytest.mark.redis
async def test_dead_letters_are_listed_shown_and_requeued(queue: RedisTransferQueue) -> None:
    for lease in await queue.lease_episodes("worker", 2, 0):
        await queue.fail(lease, Outcome(OutcomeKind.INFRA_ERROR, "the box is gone", "sandbox"))
    letters = ("queue", "dead-letters")
    assert "train/0#1  attempts 1  sandbox: the box is gone" in (await invoke(*letters, "list", "mine")).stdout
    letter = json.loads((await invoke(*letters, "show", "train/0#1", "mine")).stdout)
    assert (letter["component"], letter["journal"]) == ("sandbox", [])
    await invoke(*letters, "show", "train/9#1", "mine", code=1)
    await invoke(*letters, "requeue", "train/0#1", "mine")
    assert (await queue.status()).groups["queued"] == 1


@pytest.mark.redis
async def test_drop_deletes_the_run(queue: RedisTransferQueue) -> None:
    await invoke("queue", "drop", "mine", code=1)  # without --yes a person is asked
    assert "keys deleted" in (await invoke("queue", "drop", "mine", "--yes")).stdout
    with pytest.raises(NoSuchRun):
        await queue.config()


async def test_acl_prints_users_for_a_redis_of_your_own() -> None:
    result = await invoke("queue", "acl", "mine")
    lines = result.stdout.splitlines()
    assert [line.split()[2] for line in lines] == [f"mine-{role}" for role in RIGHTS]
    for line, login in zip(lines, result.stderr.splitlines(), strict=True):
        password = login.partition("PENSTOCK_REDIS_PASSWORD=")[2]
        assert f"#{hashlib.sha256(password.encode()).hexdigest()}" in line.split()


REMOTE = ("--queue", "redis://127.0.0.1:1", "--run", "r")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("queue", "status", "mien"), "mien: no such run; did you mean 'mine'?"),
        (("queue", "dead-letters", "list", "mien"), "mien: no such run; did you mean 'mine'?"),
        (("status", "mien"), "mien: no such run; did you mean 'mine'?"),
        (("trace", "mien"), "mien: no such run; did you mean 'mine'?"),
        (("queue", "acl", "a*"), "a*"),
        (("agent", "--name", "a"), "--queue or PENSTOCK_QUEUE is not set"),
        (("agent", "--name", "a", *REMOTE), "PENSTOCK_TOKEN is not set"),
        (("data", "gsm8k-equations", "--input", "bad", "--out", "out"), "test.jsonl"),
        (("bench", "nonsense"), "there are:"),
        (("bench", "queue", "--model", "9m"), "--model: queue measures no model"),
    ],
)
async def test_a_mistake_is_one_message(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PENSTOCK_QUEUE", "PENSTOCK_RUN", "PENSTOCK_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    begun = {
        "runs/mine/config.yaml": "name: mine",
        "runs/mine/metrics.jsonl": "{}",
        "runs/mint/config.yaml": "name: mint",
    }
    for name, text in {**begun, "bad/train.jsonl": "{}", "bad/test.jsonl": "no"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.chdir(tmp_path)
    assert message in (await invoke(*words, code=2)).stderr


def test_the_name_of_a_run_stands_for_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").write_text("name: mine")
    (tmp_path / "other").mkdir()
    assert run_or_path(Path("mine")) == Path("runs/mine")
    assert run_or_path(Path("other")) == Path("other"), "what is here comes first"
    assert run_or_path(Path("nothing")) == Path("nothing")
    assert recipe_or_run(Path("mine")) == Path("runs/mine/config.yaml")
    assert folder_of_run("other", Path("runs")) == Path("runs/other"), "the folder here is no run"
    (tmp_path / "other" / "config.yaml").write_text("name: other")
    assert folder_of_run("other", Path("runs")) == Path("other")


@pytest.mark.parametrize(
    "words",
    [("status", "mien"), ("rehearse", "none.yaml", "--policy", "x"), ("run", "none.yaml"), ("eval", "none.yaml")],
)
async def test_json_holds_the_error_of_a_command_that_fails(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    failed = await invoke(*words, "--json", code=2)
    message = json.loads(failed.stdout)["error"]
    assert words[1] in message
    assert message.split() == failed.stderr.split()


@pytest.mark.parametrize(
    "words", [("queue", "status"), ("queue", "dead-letters", "list"), ("queue", "drop", "--yes"), ("train",)]
)
async def test_queue_that_is_away_is_reported_soon(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"QUEUE": "redis://127.0.0.1:1", "RUN": "mine", "TOKEN": "t"}.items():
        monkeypatch.setenv(f"PENSTOCK_{name}", value)
    monkeypatch.delenv("PENSTOCK_SUPERVISED", raising=False)
    deadlines, connect = set[float](), RunConnection.connect

    async def recorded(link: RunConnection, settings: TransferQueueConfig, *rest: Any) -> Any:
        deadlines.add(settings.deadline_s)
        return await connect(link, settings, *rest)

    monkeypatch.setattr(RunConnection, "connect", recorded)
    assert "no answer from redis://127.0.0.1:1 for " in (await invoke(*words, code=2)).stderr
    assert deadlines == {INTERACTIVE.deadline_s}
    assert INTERACTIVE.deadline_s < TransferQueueConfig().deadline_s / 10


async def test_generated_problems_become_parquet(tmp_path: Path) -> None:
    result = await invoke("data", "calculator", "--out", str(tmp_path), "--train", "8", "--eval", "4")
    assert (tmp_path / "train.parquet").exists()
    assert "4 problems" in result.stdout
    assert "queue" in (await invoke("bench", "list")).stdout
