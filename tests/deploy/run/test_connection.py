"""A role's login: its own, in the environment or in connect.env; and queues of living runs by their folders."""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.deploy import ConfigError, RoleSpec, RunConfig, RunConnection, RunDir, dump_config, limits_of, roles_of
from penstock.deploy.run.connection import FolderQueues, connection_of_run, own_redis
from penstock.deploy.run.plan import page_roles
from penstock.rollout_server import RolloutConfig
from penstock.trainer import DataConfig
from penstock.transfer_queue import Limits, NoSuchRun, QueueError, RedisServer
from penstock.transfer_queue.redis import Connection, find_redis_server

CONFIG = RunConfig(name="mine", model="m", data=DataConfig(train="t"))
PASSWORDS = {"trainer": "trainers-own", "agent": "agents-own", "rollout": "rollouts-own", "watch": "for-onlookers"}
LINK = RunConnection("redis://127.0.0.1:1", "mine", "owners-own", "token", role_passwords=PASSWORDS)
ODD = RunConnection("rediss://h:1?ssl_ca_certs=/my ca&b=no", "mine", "p q'\"$x", "token=with=signs", "agent", PASSWORDS)


@pytest.fixture
def specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RoleSpec]:
    """Of all roles, started from a shell with a login and a provider's key of its own."""
    variables = {"PENSTOCK_REDIS_USER": "somebody", "PENSTOCK_REDIS_PASSWORD": "else", "E2B_API_KEY": "provider-key"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return [role.spec(tmp_path) for role in roles_of(CONFIG, LINK)]


def login(spec: RoleSpec) -> tuple[str, str]:
    return spec.env["PENSTOCK_REDIS_USER"], spec.env["PENSTOCK_REDIS_PASSWORD"]


def test_each_role_gets_its_own_secrets(specs: list[RoleSpec]) -> None:
    roles = [spec.name.partition("-")[0] for spec in specs]
    assert set(roles) == {"rollout", "agent", "trainer"}
    for role, spec in zip(roles, specs, strict=True):
        assert login(spec) == (role, PASSWORDS[role])
        assert not ({LINK.password, *PASSWORDS.values()} - {PASSWORDS[role]}) & set(spec.env.values())
        assert ("provider-key" in spec.env.values()) == (role == "agent"), "only workers make boxes"


def test_a_queue_without_users_of_roles_is_joined_with_the_given_login(tmp_path: Path) -> None:
    link = RunConnection("redis://127.0.0.1:1", "mine", "password", "token", "mine-agent")
    assert {login(role.spec(tmp_path)) for role in roles_of(CONFIG, link)} == {("mine-agent", "password")}


def test_the_page_has_only_an_agents_rights(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"runs_dir": str(tmp_path)})
    run = RunDir.of(config)
    assert page_roles(config, run, LINK) == []
    page = config.dashboard.model_copy(update={"enabled": True, "port": 0})
    (role,) = page_roles(config.model_copy(update={"dashboard": page}), run, LINK)
    spec = role.spec(run.logs)
    assert list(spec.argv[3:]) == ["dashboard", str(tmp_path), "--host", "127.0.0.1", "--port", "0"]
    assert login(spec) == ("agent", "agents-own")
    assert PASSWORDS["trainer"] not in spec.env.values()


def test_a_server_for_evaluations_is_one_more(tmp_path: Path) -> None:
    rollout = RolloutConfig(evaluation_server=True, servers=2, port=7000)
    specs = [role.spec(tmp_path) for role in roles_of(CONFIG.model_copy(update={"rollout": rollout}), LINK)]
    servers = {spec.name: spec.argv for spec in specs if login(spec)[0] == "rollout"}
    assert [name for name, argv in servers.items() if "--evaluates" in argv] == ["rollout-eval"]
    assert [argv[argv.index("--port") + 1] for argv in servers.values()] == ["7000", "7001", "7002"]


def set_environment(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("link", [LINK.of_role("agent"), ODD, RunConnection("unix:///s", "mine", None, "token")])
def test_a_link_survives_the_environment_and_a_shell(link: RunConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = RunConnection(link.url, link.run, link.password, link.token, link.username)
    set_environment(monkeypatch, link.environment())
    assert RunConnection.from_environment() == bare
    lines = link.shell_lines()
    assert RunConnection.from_lines(lines) == bare, "logins of roles are comments"
    exports = [line for line in lines.splitlines() if not line.startswith("#")]
    assert dict(word.split("=", 1) for line in exports for word in shlex.split(line)[1:]) == link.environment()
    comment = "# agent alone: export PENSTOCK_REDIS_USER=agent PENSTOCK_REDIS_PASSWORD=agents-own"
    assert (comment in lines) == bool(link.role_passwords)


def test_connect_env_without_a_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="PENSTOCK_TOKEN"):
        RunConnection.from_lines("export PENSTOCK_QUEUE=redis://h PENSTOCK_RUN=mine")


def test_connection_of_run_by_its_folder_or_its_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_RUN", raising=False)
    config = CONFIG.model_copy(update={"runs_dir": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"run mine is not running on this machine; source its connect\.env"):
        connection_of_run(config)
    run = RunDir.of(config)
    run.root.mkdir()
    run.connect_env.write_text(LINK.shell_lines())
    assert connection_of_run(config).password == "owners-own"
    set_environment(monkeypatch, LINK.of_role("agent").environment())
    assert connection_of_run(config).username == "agent", "the shell's own rights, not the owner's"


@pytest.mark.redis
async def test_the_runs_own_redis_knows_the_roles_and_they_wait_for_the_run(tmp_path: Path) -> None:
    async with own_redis(CONFIG, RunDir(tmp_path), "token") as (link, _):
        assert set(link.role_passwords) == set(PASSWORDS)
        agent = link.of_role("agent")
        connection = await Connection.connect(agent.url, deadline_s=5, password=agent.password, username="agent")
        with pytest.raises(QueueError, match="no permissions"):
            await connection.command("HSET", "penstock:{mine}:steps", "version", 7)
        assert await connection.command("HSET", "penstock:{mine}:counts", "a", 1) == 1
        await connection.close()
        with pytest.raises(NoSuchRun, match="no run mine"):
            await agent.join()
        joining = asyncio.create_task(agent.join(wait_s=30))
        queue = await link.connect()
        await asyncio.sleep(0.1)
        assert not joining.done()
        await queue.create_run(limits_of(CONFIG), dump_config(CONFIG))
        joined, config = await joining
        assert config == CONFIG
        await asyncio.gather(joined.close(), queue.close())


@pytest.mark.redis
async def test_an_older_redis_has_one_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    older = replace(find_redis_server(), version=(6, 2))
    monkeypatch.setattr("penstock.deploy.run.connection.find_redis_server", lambda: older)
    with caplog.at_level(logging.WARNING):
        async with own_redis(CONFIG, RunDir(tmp_path), "token") as (link, _):
            assert link.of_role("agent").environment() == link.environment()
    assert "older than 7.0: all roles share one password" in caplog.text


@pytest.mark.redis
async def test_a_queue_is_open_as_long_as_its_run_lives(tmp_path: Path) -> None:
    async with RedisServer(tmp_path / "redis", "only-for-this-test") as server:
        queues = FolderQueues(tmp_path / "runs", own=None)
        env = tmp_path / "runs" / "mine" / "connect.env"
        env.parent.mkdir(parents=True)
        assert (queues.names(), await queues.queue("mine")) == ([], None)
        link = RunConnection(server.url, "mine", "only-for-this-test", "token")
        owner = await link.connect()
        await owner.create_run(Limits(group_size=2, groups_per_step=1, max_staleness=1), "x")
        env.write_text(link.shell_lines())
        queue = await queues.queue("mine")
        assert queue is not None
        assert (queues.names(), (await queue.status()).version) == (["mine"], 0)
        assert await queues.queue("mine") is queue, "one connection for all readers"
        env.unlink()
        assert await queues.queue("mine") is None
        env.write_text("export PENSTOCK_QUEUE=")
        assert await queues.queue("mine") is None
        await asyncio.gather(queues.close(), owner.close())


def test_the_run_of_this_shell_needs_no_folder(tmp_path: Path) -> None:
    assert FolderQueues(tmp_path, own=LINK).names() == ["mine"]
