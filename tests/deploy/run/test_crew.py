"""Roles added and removed while a run goes on; real processes."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from tests.until import until

from penstock.deploy import RoleFailed, RoleProcess, RoleSpec
from penstock.deploy.run.plan import Kind, Role
from penstock.deploy.run.supervisor import Supervisor


class Roles:
    """Roles that are small programs: `trainer` ends when its file is there, the others on SIGTERM."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ended: list[str] = []

    def role(self, kind: Kind, number: int | None) -> Role:
        name = kind if number is None else f"{kind}-{number}"
        return Role(name, kind, (), {}, max_restarts=0, stop_grace_s=5, number=number)

    def place(self, role: Role) -> RoleProcess:
        code = (
            "import pathlib, sys, time\n"
            f"while not pathlib.Path({str(self.folder)!r}, 'trained').exists() or {role.kind != 'trainer'}:\n"
            "    time.sleep(0.01)\n"
        )
        fails = role.name in ("agent-9", "rollout-8", "rollout-9")
        argv = [sys.executable, "-c", "raise SystemExit('no such model')" if fails else code]
        process = RoleProcess(RoleSpec(role.name, argv, dict(os.environ), self.folder / f"{role.name}.log", 0, 5))
        run = process.run

        async def run_to_its_end() -> None:
            await run()
            self.ended.append(role.name)

        process.run = run_to_its_end  # type: ignore[method-assign]
        return process


@pytest.fixture
def roles(tmp_path: Path) -> Roles:
    return Roles(tmp_path)


def crew_of(roles: Roles) -> Supervisor:
    supervisor = Supervisor(roles.place, roles.role)
    for role in (roles.role("rollout", 0), roles.role("agent", 0), roles.role("agent", 1), roles.role("trainer", None)):
        supervisor.add(role)
    return supervisor


def names(supervisor: Supervisor, kind: str) -> list[str]:
    return [role.name for role in supervisor.present(kind)]


async def test_roles_come_and_go_and_the_trainer_ends_it(roles: Roles) -> None:
    supervisor = crew_of(roles)
    running = asyncio.create_task(supervisor.run([]))
    await until(lambda: all(member.pid for member in supervisor.members))
    supervisor.resize("rollout", 3)
    supervisor.resize("agent", 1)
    assert names(supervisor, "rollout") == ["rollout-0", "rollout-1", "rollout-2"]
    assert names(supervisor, "agent") == ["agent-0"]
    await until(lambda: "agent-1" in roles.ended)
    supervisor.resize("agent", 2)
    assert names(supervisor, "agent") == ["agent-0", "agent-2"], "no name is given twice: its lease may still run"
    await until(lambda: all(m.pid for m in supervisor.members if m.spec.name != "agent-1"))
    assert not running.done()
    (roles.folder / "trained").touch()
    async with asyncio.timeout(60):
        await running
    await supervisor.stop()
    assert roles.ended[:2] == ["agent-1", "trainer"]
    assert sorted(roles.ended[2:4]) == ["agent-0", "agent-2"], "workers hand their leases back before servers go"
    assert sorted(roles.ended[4:]) == ["rollout-0", "rollout-1", "rollout-2"]


@pytest.mark.parametrize(("added", "message"), [(True, "no such model"), (False, "the board is gone")])
async def test_a_role_or_helper_that_fails_for_good_ends_the_run(roles: Roles, *, added: bool, message: str) -> None:
    async def helper() -> None:
        if not added:
            raise RuntimeError("the board is gone")
        await asyncio.Event().wait()

    supervisor, helping = crew_of(roles), asyncio.create_task(helper())
    running = asyncio.create_task(supervisor.run([helping]))
    if added:
        supervisor.add(roles.role("agent", 9))
    with pytest.raises((RoleFailed, RuntimeError), match=message):
        async with asyncio.timeout(60):
            await running
    await supervisor.stop()
    assert all(member.pid is None for member in supervisor.members)
    helping.cancel()


async def test_servers_that_fail_for_good_leave_a_run_in_which_half_of_them_are_well(
    roles: Roles, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = crew_of(roles)
    running = asyncio.create_task(supervisor.run([]))
    supervisor.add(roles.role("rollout", 9))
    await until(lambda: "the run continues with 1 of 2 rollout servers" in caplog.text)
    assert "no such model" in caplog.text
    assert names(supervisor, "rollout") == ["rollout-0"]
    assert {member.spec.name for member in supervisor.members if member.state == "failed"} == {"rollout-9"}
    assert not running.done()
    supervisor.add(roles.role("rollout", 8))
    with pytest.raises(RoleFailed, match="rollout-8"):
        async with asyncio.timeout(60):
            await running
    await supervisor.stop()
    assert {member.spec.name for member in supervisor.members if member.state == "failed"} == {"rollout-8", "rollout-9"}
