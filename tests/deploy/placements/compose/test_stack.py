"""`penstock compose init`: who is told what, and what it refuses."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from tests.deploy.conftest import RECIPE
from tests.ports import free_port
from typer.testing import CliRunner

from penstock.deploy import ConfigError, app
from penstock.deploy.placements.compose.stack import Stack, make_stack
from penstock.transfer_queue.redis import find_redis_server

LOGINS = {"owner_login", "agent_login", "rollout_login", "watch_login", "page_login", "sandbox_login"}


def made(folder: Path, *overrides: str, **gpus: object) -> Path:
    make_stack(Stack(folder, RECIPE, overrides, **gpus))  # type: ignore[arg-type]
    return folder


def login(stack: Path, name: str) -> dict[str, str]:
    lines = (stack / "secrets" / name).read_text().splitlines()
    return dict(shlex.split(line)[1].split("=", 1) for line in lines)


def settings(stack: Path) -> dict[str, str]:
    pairs = (line.split("=", 1) for line in (stack / ".env").read_text().splitlines())
    return {key: "".join(shlex.split(value)) if '"' in value else value for key, value in pairs}


def test_secrets_are_for_the_containers_user_alone(tmp_path: Path) -> None:
    stack = made(tmp_path / "stack")
    uid = int(settings(stack)["PENSTOCK_UID"])
    assert uid != 0
    assert stat.S_IMODE((stack / "secrets").stat().st_mode) == 0o700
    files = list((stack / "secrets").iterdir())
    assert {file.name for file in files} == LOGINS | {"token", "redis_users"}
    for file in files:
        assert (stat.S_IMODE(file.stat().st_mode), file.stat().st_uid) == (0o600, uid)
    for folder in ("models", "runs", "logs", "redis", "prometheus"):
        assert (stack / folder).stat().st_uid == uid


def test_stack_each_service_gets_only_its_own_login(tmp_path: Path) -> None:
    stack = made(tmp_path / "stack", "name=mine")
    users = {name: login(stack, name).get("PENSTOCK_REDIS_USER") for name in LOGINS}
    assert users == {
        **{f"{role}_login": f"mine-{role}" for role in ("owner", "agent", "rollout", "watch")},
        "page_login": "mine-agent",
        "sandbox_login": None,
    }
    passwords = [
        login(stack, f"{role}_login")["PENSTOCK_REDIS_PASSWORD"] for role in ("owner", "agent", "rollout", "watch")
    ]
    assert len(set(passwords)) == 4
    token = (stack / "secrets" / "token").read_text()
    assert {login(stack, name)["PENSTOCK_TOKEN"] for name in LOGINS} == {token}
    view = login(stack, "page_login")["PENSTOCK_VIEW_TOKEN"]
    assert view != token
    outside = [stack / "secrets" / "redis_users", *(file for file in stack.iterdir() if file.is_file())]
    for file in outside:
        assert not [secret for secret in (*passwords, token, view) if secret in file.read_text()], file
    other = made(tmp_path / "other", "name=mine")
    for file in (stack / "secrets").iterdir():
        assert file.read_text() != (other / "secrets" / file.name).read_text()


def test_the_head_is_killed_no_earlier_than_its_last_checkpoint_takes(tmp_path: Path) -> None:
    assert settings(made(tmp_path / "small"))["PENSTOCK_STOP_GRACE_S"] == "90"
    stack = made(tmp_path / "large", "trainer.stop_grace_s=600")
    assert settings(stack)["PENSTOCK_STOP_GRACE_S"] == "665"
    head = yaml.safe_load((stack / "compose.yaml").read_text())["services"]["head"]
    assert head["stop_grace_period"] == "${PENSTOCK_STOP_GRACE_S:-90}s"
    assert head["environment"]["PENSTOCK_STOP_GRACE_S"] == "${PENSTOCK_STOP_GRACE_S:-90}"


@pytest.mark.redis
def test_the_queue_knows_the_users_and_nobody_else(tmp_path: Path) -> None:
    """A redis-server started as the compose file says."""
    stack = made(tmp_path / "stack", "name=mine")
    service = yaml.safe_load((stack / "compose.yaml").read_text())["services"]["redis"]
    port = free_port()
    command = service["command"].replace("0.0.0.0", "127.0.0.1").replace("6379", str(port))
    command = command.replace("/run/secrets", str(stack / "secrets")).replace("/data", str(tmp_path))
    with subprocess.Popen([find_redis_server().path, *shlex.split(command)], stdout=subprocess.DEVNULL) as server:
        try:
            assert _ask(port, login(stack, "watch_login"), "PING") == "PONG"
            assert "NOAUTH" in _ask(port, {}, "PING")
            assert "NOPERM" in _ask(port, login(stack, "agent_login"), "SET", "another", "run")
            assert "NOPERM" in _ask(port, login(stack, "owner_login"), "CONFIG", "GET", "*")
        finally:
            server.terminate()


def _ask(port: int, who: dict[str, str], *command: str) -> str:
    user = ["--user", who["PENSTOCK_REDIS_USER"]] if who else []
    environment = {**os.environ, **({"REDISCLI_AUTH": who["PENSTOCK_REDIS_PASSWORD"]} if who else {})}
    argv = ["redis-cli", "-p", str(port), *user, *command]
    deadline = time.monotonic() + 60
    while True:
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)
        answer = (done.stdout + done.stderr).strip()
        if "Could not connect" not in answer or time.monotonic() > deadline:
            return answer
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("overrides", "gpus", "message"),
    [
        (["data.train=$HOME"], {}, "PENSTOCK_OVERRIDES"),
        (["data.train=a`b"], {}, "PENSTOCK_OVERRIDES"),
        (["data.train=a\nb"], {}, "PENSTOCK_OVERRIDES"),
        (["model=/usr/lib"], {}, r"model: /usr/lib lies outside of .*/recipes.*model=/work/models/NAME"),
        ([], {"trainer_gpus": "0,1", "rollout_gpus": ["1"]}, "GPU 1 is given twice"),
        ([], {"trainer_gpus": "all", "rollout_gpus": ["1"]}, "write their numbers"),
    ],
)
def test_what_a_stack_cannot_hold_is_refused(
    tmp_path: Path, overrides: list[str], gpus: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        made(tmp_path / "stack", *overrides, **gpus)
    assert list(tmp_path.iterdir()) == []


def test_an_engine_of_its_own_image_is_told_where_its_python_is(tmp_path: Path) -> None:
    found = settings(made(tmp_path / "stack", "rollout.engine=vllm", "model=/work/models/mine"))
    assert found["PENSTOCK_ENGINE"] == "vllm"
    assert "rollout.vllm_python=/usr/local/bin/engine-python" in found["PENSTOCK_OVERRIDES"]


def test_each_rollout_server_has_its_own_gpus(tmp_path: Path) -> None:
    stack = made(tmp_path / "stack", trainer_gpus="0,1", rollout_gpus=["2", "3,4"])
    services = yaml.safe_load((stack / "gpu.yaml").read_text())["services"]
    devices = {
        name: service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name, service in services.items()
    }
    assert devices == {"head": ["0", "1"], "rollout": ["2"], "rollout-1": ["3", "4"]}
    base = yaml.safe_load((stack / "compose.yaml").read_text())["services"]["rollout"]
    assert {key for key in base if services["rollout-1"].get(key) != base[key]} == {"networks"}
    assert services["rollout-1"]["networks"]["metrics"] == {"aliases": ["rollout"]}
    assert settings(stack)["COMPOSE_FILE"] == "compose.yaml:gpu.yaml"


def test_the_command_says_what_comes_next(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["compose", "init", str(tmp_path / "stack"), str(RECIPE), "name=mine"])
    assert (done.exit_code, done.stdout) == (0, "")
    assert f"run mine: cd {tmp_path / 'stack'} && docker compose up -d" in done.stderr
    before = (tmp_path / "stack" / "secrets" / "token").read_text()
    refused = CliRunner().invoke(app, ["compose", "init", str(tmp_path / "stack"), str(RECIPE)])
    assert refused.exit_code == 2
    assert "not empty: a stack's secrets and queue belong to one run" in " ".join(refused.stderr.split())
    assert (tmp_path / "stack" / "secrets" / "token").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["stack"]
    half = CliRunner().invoke(app, ["compose", "init", str(tmp_path / "other"), str(RECIPE), "--trainer-gpus", "0"])
    assert half.exit_code == 2
    assert not (tmp_path / "other").exists()
