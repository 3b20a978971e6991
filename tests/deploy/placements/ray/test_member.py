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

    async def play(self, events: str) -> None:
        """``L``: the actor has a new life, ``P``: its process was started again, ``-``: a day passes."""
        for event in events:
            if event == "L":
                assert await self.member._meet()
            elif event == "P":
                self.actor.restarts += 1
                await self.member._look()
            else:
                self.now += 24 * RESTART_WINDOW_S


@pytest.mark.parametrize(
    ("events", "restarts", "last"),
    [
        ("L" + 6 * "-LP", 12, ""),  # weeks apart they do not add up
        ("LPL", 2, "L"),
        ("LLP", 2, "P"),
        ("LPPPP", 4, ""),  # in its first life the actor itself reports that its process failed
    ],
)
async def test_restarts_of_actor_and_process_add_up_within_a_window(
    events: str, restarts: int, last: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = MemberWithClock(monkeypatch, tmp_path)
    await made.play(events)
    assert made.member.restarts == restarts
    if last:
        with pytest.raises(RoleFailed, match=r"agent-0.*2 restarts used up within 3600 s"):
            await made.play(last)
