"""How a role is told its login: one's own, in the environment, and nobody else's."""

from __future__ import annotations

import asyncio
import logging
import shlex
from pathlib import Path

import pytest

from penstock.deploy import ConfigError, RunConfig, RunConnection, RunDir, dump_config, limits_of, roles_of
from penstock.deploy.run.connection import connection_of_run, own_redis
from penstock.rollout_server import RolloutConfig
from penstock.trainer import DataConfig
from penstock.transfer_queue import NoSuchRun, QueueError
from penstock.transfer_queue.redis import Connection, RedisBinary, find_redis_server

CONFIG = RunConfig(name="mine", model="m", data=DataConfig(train="t"))
PASSWORDS = {"trainer": "trainers-own", "agent": "agents-own", "rollout": "rollouts-own", "watch": "for-onlookers"}
LINK = RunConnection("redis://127.0.0.1:1", "mine", "owners-own", "token", role_passwords=PASSWORDS)


def test_connection_of_run_by_its_folder_or_its_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_RUN", raising=False)
    config = CONFIG.model_copy(update={"runs_dir": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"run mine is not running on this machine; source its connect\.env"):
        connection_of_run(config)
    run = RunDir.of(config)
    run.root.mkdir()
    run.connect_env.write_text(LINK.shell_lines())
    assert connection_of_run(config).password == "owners-own"
    for name, value in LINK.of_role("agent").environment().items():
        monkeypatch.setenv(name, value)
    assert connection_of_run(config).username == "agent", "the shell's own rights, not the owner's"


def test_each_role_gets_its_own_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS_USER", "somebody")
    monkeypatch.setenv("PENSTOCK_REDIS_PASSWORD", "else")
    specs = [role.spec(tmp_path) for role in roles_of(CONFIG, LINK)]
    assert {spec.name.partition("-")[0] for spec in specs} == {"rollout", "agent", "trainer"}
    for spec in specs:
        role = spec.name.partition("-")[0]
        assert (spec.env["PENSTOCK_REDIS_USER"], spec.env["PENSTOCK_REDIS_PASSWORD"]) == (role, PASSWORDS[role])
        secrets_of_others = {LINK.password, *PASSWORDS.values()} - {PASSWORDS[role]}
        assert not secrets_of_others & set(spec.env.values())


def test_only_makers_of_boxes_get_keys_of_providers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "a provider's key")
    specs = [role.spec(tmp_path) for role in roles_of(CONFIG, LINK)]
    holders = {spec.name.partition("-")[0] for spec in specs if "a provider's key" in spec.env.values()}
    assert holders == {"agent"}


def test_a_server_for_evaluations_is_one_more(tmp_path: Path) -> None:
    rollout = RolloutConfig(evaluation_server=True, servers=2, port=7000)
    roles = roles_of(CONFIG.model_copy(update={"rollout": rollout}), LINK)
    specs = [role.spec(tmp_path) for role in roles]
    servers = {spec.name: spec for spec in specs if spec.env["PENSTOCK_REDIS_USER"] == "rollout"}
    assert [name for name, spec in servers.items() if "--evaluates" in spec.argv] == ["rollout-eval"]
    assert [spec.argv[spec.argv.index("--port") + 1] for spec in servers.values()] == ["7000", "7001", "7002"]


def test_a_queue_without_users_of_roles_is_joined_as_given(tmp_path: Path) -> None:
    link = RunConnection("redis://127.0.0.1:1", "mine", "password", "token", "mine-agent")
    for spec in (role.spec(tmp_path) for role in roles_of(CONFIG, link)):
        assert spec.env["PENSTOCK_REDIS_USER"] == "mine-agent"
        assert spec.env["PENSTOCK_REDIS_PASSWORD"] == "password"


def test_a_link_goes_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for link in (LINK.of_role("agent"), RunConnection("unix:///s", "mine", None, "token")):
        for name, value in link.environment().items():
            monkeypatch.setenv(name, value)
        assert RunConnection.from_environment() == link


def test_the_lines_for_a_shell_are_safe_to_source() -> None:
    link = RunConnection(
        "rediss://host?ssl_ca_certs=/my ca&ssl_check_hostname=no", "mine", "a'b", "token", role_passwords=PASSWORDS
    )
    exports = [line for line in link.shell_lines().splitlines() if not line.startswith("#")]
    told = dict(word.split("=", 1) for line in exports for word in shlex.split(line)[1:])
    assert told == dict(link.environment())
    assert "# agent alone: export PENSTOCK_REDIS_USER=agent PENSTOCK_REDIS_PASSWORD=agents-own" in link.shell_lines()


@pytest.mark.redis
async def test_a_role_waits_for_a_run_that_has_not_begun(tmp_path: Path) -> None:
    async with own_redis(CONFIG, RunDir(tmp_path), "token") as (link, _):
        with pytest.raises(NoSuchRun, match="no run mine"):
            await link.of_role("agent").join()
        joining = asyncio.create_task(link.of_role("agent").join(wait_s=30))
        queue = await link.connect()
        await asyncio.sleep(0.1)
        assert not joining.done()
        await queue.create_run(limits_of(CONFIG), dump_config(CONFIG))
        joined, config = await joining
        assert config == CONFIG
        await asyncio.gather(joined.close(), queue.close())


@pytest.mark.redis
async def test_the_runs_own_redis_knows_the_roles(tmp_path: Path) -> None:
    async with own_redis(CONFIG, RunDir(tmp_path), "token") as (link, _):
        assert set(link.role_passwords) == set(PASSWORDS)
        agent = link.of_role("agent")
        connection = await Connection.connect(agent.url, deadline_s=5, password=agent.password, username="agent")
        with pytest.raises(QueueError, match="no permissions"):
            await connection.command("HSET", "penstock:{mine}:steps", "version", 7)
        assert await connection.command("HSET", "penstock:{mine}:counts", "a", 1) == 1
        await connection.close()


@pytest.mark.redis
async def test_an_older_redis_has_one_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = find_redis_server()
    monkeypatch.setattr("penstock.deploy.run.connection.find_redis_server", lambda: RedisBinary(found.path, (6, 2)))
    with caplog.at_level(logging.WARNING):
        async with own_redis(CONFIG, RunDir(tmp_path), "token") as (link, _):
            assert link.of_role("agent").environment() == link.environment()
    assert "older than 7.0: all roles share one password" in caplog.text
