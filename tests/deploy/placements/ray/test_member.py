"""Restarts of an actor and of its process count together, within a window."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from penstock.deploy import RoleFailed, RoleSpec
from penstock.deploy.placements.ray.actor import ActorLife, ProcessState
from penstock.deploy.placements.ray.placement import RayMember
from penstock.deploy.run.processes import RESTART_WINDOW_S, RestartBudget


class StubActor:
    """An actor that is another one at each `hello`."""

    def __init__(self) -> None:
        self.lives, self.restarts = 0, 0
        self.hello = SimpleNamespace(remote=self._hello)
        self.state = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._state))

    async def _hello(self) -> ActorLife:
        self.lives, self.restarts = self.lives + 1, 0
        return ActorLife(str(self.lives), "node", "machine")

    async def _state(self) -> ProcessState:
        return ProcessState(1, self.restarts, str(self.lives))


class MemberWithClock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.now, self.actor = 0.0, StubActor()
        module = "penstock.deploy.placements.ray.placement"
        monkeypatch.setattr(f"{module}.placement_group", lambda *_, **__: None)
        monkeypatch.setattr(f"{module}._make_actor", lambda *_: self.actor)
        spec = RoleSpec("agent-0", [], {}, tmp_path / "log", 2)
        order: Any = None
        self.member = RayMember(spec, order, {"CPU": 1})
        self.member._budget = RestartBudget(2, RESTART_WINDOW_S, clock=lambda: self.now)

    async def new_life(self) -> None:
        assert await self.member._meet()

    async def process_restarts(self) -> None:
        self.actor.restarts += 1
        await self.member._look()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MemberWithClock:
    return MemberWithClock(monkeypatch, tmp_path)


async def test_restarts_weeks_apart_do_not_add_up(made: MemberWithClock) -> None:
    await made.new_life()
    for _ in range(6):
        made.now += 24 * RESTART_WINDOW_S
        await made.new_life()
        await made.process_restarts()
    assert made.member.restarts == 12


async def test_restarts_within_the_window_add_up(made: MemberWithClock) -> None:
    await made.new_life()
    await made.process_restarts()
    await made.new_life()
    with pytest.raises(RoleFailed, match="2 restarts used up within 3600 s"):
        await made.new_life()


async def test_restarts_of_a_later_life_count_too(made: MemberWithClock) -> None:
    await made.new_life()
    await made.new_life()
    await made.process_restarts()
    with pytest.raises(RoleFailed, match="agent-0"):
        await made.process_restarts()


async def test_the_actor_itself_says_that_its_process_failed(made: MemberWithClock) -> None:
    await made.new_life()
    for _ in range(4):
        await made.process_restarts()
    assert made.member.restarts == 4
