"""Queues of living runs, found by what `penstock run` leaves in their folders; real redis."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.deploy import ConfigError, RunConfig, RunConnection, RunDir
from penstock.deploy.run.connection import FolderQueues
from penstock.deploy.run.plan import page_roles
from penstock.transfer_queue import Limits, RedisServer

PASSWORD = "only-for-this-test"
LINK = RunConnection(
    "redis://h:1", "mine", "p q'\"$x", "token=with=signs", "agent", {"trainer": "other", "agent": "its-own"}
)


def test_a_link_is_read_back_from_the_lines_for_the_shell() -> None:
    read = RunConnection.from_lines(LINK.shell_lines())
    assert (read.url, read.run, read.password, read.token, read.username) == (*astuple(LINK), "agent")
    assert read.role_passwords == {}, "the logins of roles are comments"
    with pytest.raises(ConfigError, match="PENSTOCK_TOKEN"):
        RunConnection.from_lines("export PENSTOCK_QUEUE=redis://h PENSTOCK_RUN=mine")


def astuple(link: RunConnection) -> tuple[str, str, str | None, str]:
    return link.url, link.run, link.password, link.token


@pytest.mark.redis
async def test_a_run_is_found_while_it_lives_and_found_again(tmp_path: Path) -> None:
    async with RedisServer(tmp_path / "redis", PASSWORD) as server:
        queues = FolderQueues(tmp_path / "runs", own=None)
        env = tmp_path / "runs" / "mine" / "connect.env"
        env.parent.mkdir(parents=True)
        assert (queues.names(), await queues.queue("mine")) == ([], None)
        link = RunConnection(server.url, "mine", PASSWORD, "token")
        owner = await link.connect()
        await owner.create_run(Limits(group_size=2, groups_per_step=1, max_staleness=1), "x")
        env.write_text(link.shell_lines())
        found = await queues.queue("mine")
        assert found is not None
        assert (await found.status()).version == 0
        assert queues.names() == ["mine"]
        assert await queues.queue("mine") is found, "one connection for all who look"
        env.unlink()
        assert await queues.queue("mine") is None
        env.write_text("export PENSTOCK_QUEUE=")
        assert await queues.queue("mine") is None
        await queues.close()
        await owner.close()


def test_the_run_of_this_shell_needs_no_folder(tmp_path: Path) -> None:
    assert FolderQueues(tmp_path, own=LINK).names() == ["mine"]


def test_page_role_has_only_an_agents_rights(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"model": "m", "data": {"train": "t"}, "runs_dir": str(tmp_path), "name": "mine"})
    run = RunDir.of(config)
    assert page_roles(config, run, LINK) == []
    page = config.dashboard.model_copy(update={"enabled": True, "port": 0})
    (role,) = page_roles(config.model_copy(update={"dashboard": page}), run, LINK)
    spec = role.spec(run.logs)
    assert list(spec.argv[3:]) == ["dashboard", str(tmp_path), "--host", "127.0.0.1", "--port", "0"]
    assert (spec.env["PENSTOCK_REDIS_USER"], spec.env["PENSTOCK_REDIS_PASSWORD"]) == ("agent", "its-own")
    assert "other" not in spec.env.values()
