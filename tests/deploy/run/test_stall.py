"""A run without progress ends: the stuck part is named, and stacks are written."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.conftest import RECIPE, REPOSITORY, assert_nothing_left

from penstock.deploy import RoleProcess, RunDir, load_config
from penstock.deploy.run.launcher import launch
from penstock.deploy.run.plan import Role
from penstock.deploy.run.stall import LocalRole, Snapshot, diagnose_stall
from penstock.deploy.run.supervisor import LocalPlacement, StalledRun, VersionRefused, Watchdog
from penstock.transfer_queue import ServerInfo, Status

ROLES = tuple(LocalRole(name, running=True) for name in ("rollout-0", "agent-0", "agent-1", "trainer"))
UP = ServerInfo("rollout-0", "http://a", 3)
IDLE = Status(3, 3, 0, {"queued": 9}, {"leased": 0}, 0, {}, {"agent-0": 0, "agent-1": 0})


def snapshot(
    status: Status | None = IDLE, servers: tuple[ServerInfo, ...] = (UP,), roles: tuple[LocalRole, ...] = ROLES
):
    return Snapshot(status, servers, roles, groups_per_step=4, max_staleness=1, steps=10)


def groups(**counts: int) -> Status:
    return replace(IDLE, groups={"queued": 9, **counts})


LEASED = replace(groups(admitted=2), episodes={"leased": 12}, workers={"agent-0": 0, "agent-1": 12})
EVALUATION = replace(
    IDLE, version=10, groups={"queued": 5, "shipped": 0}, other_splits={"eval": {"leased": 3, "queued": 0}}
)

CASES = {
    "held": (snapshot(roles=(*ROLES[:3], LocalRole("trainer", running=True, is_suspended=True))), "trainer", "SIGSTOP"),
    "dead": (snapshot(roles=(LocalRole("agent-0", running=False, restarts=4), *ROLES)), "agent-0", "4 restarts"),
    "queue": (snapshot(None), "queue", "does not answer"),
    "a batch": (snapshot(groups(shipped=4)), "trainer", "has leased step 2"),
    "ready": (snapshot(groups(ready=4)), "trainer", "4 make a step"),
    "no server": (snapshot(LEASED, ()), "rollout-0", "no server is in the registry"),
    "closed": (snapshot(LEASED, (replace(UP, accepting=False),)), "rollout-0", "GET /health"),
    "asleep": (snapshot(LEASED, (replace(UP, accepting=False, asleep=True),)), "trainer", "engines are asleep"),
    "old": (snapshot(LEASED, (replace(UP, version=1),)), "rollout-0", "weights are version 1, version 3 is published"),
    "in flight": (snapshot(LEASED, (replace(UP, in_flight=7), replace(UP, server_id="b"))), "rollout-0", "7 requests"),
    "tools": (snapshot(LEASED), "agent-1", "12 episodes are held and no server has a request"),
    "slow groups": (
        snapshot(replace(LEASED, groups={"queued": 1, "ready": 5, "admitted": 2})),
        "agent-1",
        "12 episodes",
    ),
    "no worker": (snapshot(), "agent-0, agent-1", "room for 8, and no worker leases"),
    "full": (snapshot(groups(admitted=8)), "trainer", "which is the limit"),
    "no tasks": (snapshot(replace(IDLE, groups={"ready": 3, "submitted": 9})), "trainer", "submits none"),
    "loading": (snapshot(replace(IDLE, groups={})), "trainer", "submitted no task yet"),
    "evaluation": (snapshot(EVALUATION, (replace(UP, version=10),)), "agent-0, agent-1", "3 episodes are held"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_part_that_should_have_moved_is_named(case: str) -> None:
    state, part, why = CASES[case]
    cause = diagnose_stall(state)
    assert (cause.part, why in cause.why) == (part, True), cause


HANGS = """
import asyncio
from penstock.agent_loops import AgentLoopBase

class Hangs(AgentLoopBase):
    async def run(self, task):
        await self.wait_for_a_bus()

    async def wait_for_a_bus(self):
        await asyncio.Event().wait()
"""
SERVER = ServerInfo("rollout-0", "http://a", 0)
NOTHING = Status(0, 0, 0, {"queued": 9}, {"leased": 0}, 0, {}, {})


def whole(test: Any) -> Any:
    """A test that runs a whole run."""
    for mark in (pytest.mark.slow, pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch, pytest.mark.timeout(900)):
        test = mark(test)
    return test


async def test_watchdog_without_progress_ends_the_run_and_names_the_cause() -> None:
    reported: list[str] = []
    watchdog = Watchdog(load_config(RECIPE, ["stall_timeout_s=1e-6"]), [], reported.append)
    await watchdog.look(0, NOTHING, [SERVER])  # progress: a server came
    await watchdog.look(0, replace(NOTHING, episodes={"completed": 1}), [SERVER])
    assert reported == []
    with pytest.raises(StalledRun) as caught:
        await watchdog.look(0, replace(NOTHING, episodes={"completed": 1}), [SERVER])
    # The command prints the error, with the cause.
    assert len(reported) == 1
    assert "stuck is" not in reported[0]
    assert "stuck is agent workers: 9 groups are queued, admission has room for 24" in caught.value.why


async def test_watchdog_returning_server_is_no_progress() -> None:
    watchdog = Watchdog(load_config(RECIPE, ["stall_timeout_s=1e-6"]), [], lambda _: None)
    await watchdog.look(0, NOTHING, [SERVER])
    with pytest.raises(StalledRun, match="no server is in the registry") as caught:
        await watchdog.look(0, NOTHING, [])
    assert "\n" not in caught.value.why


def refusing(name: str, version: int | None, **changes: Any) -> ServerInfo:
    server = replace(SERVER, server_id=name, refused=version, **changes)
    return replace(server, refusal=f"version {version} refused, version 0 stays: tensor 'w' is missing")


async def test_a_version_that_every_server_refuses_ends_the_run() -> None:
    watchdog = Watchdog(load_config(RECIPE), [], lambda _: None)
    newest, both = replace(NOTHING, version=2), [refusing("rollout-0", 2), refusing("rollout-1", 2)]
    for servers in (
        [],
        [refusing("rollout-0", 2), replace(SERVER, server_id="rollout-1")],
        [refusing("rollout-0", 1), refusing("rollout-1", 2)],
        [refusing("rollout-eval", 2, evaluates=True)],
    ):
        for _ in range(3):
            await watchdog.look(2, newest, servers)
    await watchdog.look(2, newest, both)
    await watchdog.look(2, replace(NOTHING, version=3), both)
    await watchdog.look(2, newest, both)
    with pytest.raises(VersionRefused) as caught:
        await watchdog.look(2, newest, [*both, refusing("rollout-eval", None, evaluates=True)])
    assert re.search(
        r"version 2.*rollout-0, rollout-1.*tensor 'w' is missing.*rollout\.engine.*--resume", caught.value.why
    )
    assert "\n" not in caught.value.why


REFUSING_ENGINE = """
from penstock.weight_sync import WeightsRefused
from penstock.rollout_server.engines.hf.engine import HFEngine

async def load_weights(self, manifest):
    raise WeightsRefused(f"version {manifest.version}: tensor 'experts.gate_up_proj' does not belong to the model")

HFEngine.load_weights = load_weights
"""


class RefusingServers(LocalPlacement):
    """`folder` has a sitecustomize.py for the rollout servers."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._path = f"{folder}{os.pathsep}{REPOSITORY / 'src'}"

    def place(self, role: Role, run: RunDir) -> RoleProcess:
        env = {**role.env, "PYTHONPATH": self._path} if role.kind == "rollout" else role.env
        return super().place(replace(role, env=env), run)


@whole
@pytest.mark.deep
async def test_a_version_that_the_engine_does_not_know_ends_a_run(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(REFUSING_ENGINE)
    small = ("groups_per_step=2", "group_size=2", "trainer.steps=30", "dashboard.enabled=false")
    config = load_config(RECIPE, [f"runs_dir={tmp_path}", *small])
    with pytest.raises(VersionRefused, match=r"rollout-0.*'experts\.gate_up_proj' does not belong to the model"):
        await launch(config, placement=RefusingServers(tmp_path))
    ended = json.loads((RunDir.of(config).root / "ended.json").read_text())
    assert "experts.gate_up_proj" in ended["why"]


@whole
@pytest.mark.deep
def test_watchdog_names_and_shows_a_hanging_loop(start_run, tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    words = ("agent.episode_deadline_s=600", "stall_timeout_s=60", "groups_per_step=2", "group_size=2")
    run = start_run("stuck", f"agent.loop={tmp_path / 'hangs.py'}:Hangs", *words)
    assert run.process.wait(600) == 1
    cause = run.log.read_text().partition("stuck is agent-")[2]
    assert "episodes are held and no server has a request of them" in cause
    agents = sorted((run.root / "logs").glob("agent-?.log"))  # one may hold every episode
    assert any("in Hangs.wait_for_a_bus" in log.read_text() for log in agents)
    trainer = (run.root / "logs" / "trainer.log").read_text()
    assert "in BatchSource._lease" in trainer
    assert "Current thread" in trainer
    assert run.summary()["restarts"] == dict.fromkeys(("rollout-0", "agent-0", "agent-1", "trainer"), 0)


@whole
def test_watchdog_ends_a_stalled_run_with_the_cause(start_run) -> None:
    """So impatient that the parts cannot come up in time."""
    run = start_run("impatient", "stall_timeout_s=2")
    run.wait_for((run.root / "roles.json").exists)
    pids = run.pids()
    assert run.process.wait(180) == 1
    assert run.log.read_text().count("stuck is ") == 1
    (ended,) = run.rows("ended.json")
    assert re.search("no progress for .*; stuck is ", ended["why"])
    assert run.summary()["ended"] == ended["why"]
    assert_nothing_left(run, pids)
    assert not (run.root / "roles.json").exists()


@whole
@pytest.mark.deep
def test_run_that_filters_everything_stops(start_run, tmp_path: Path) -> None:
    """Its trainer is not started again: it would filter the same groups."""
    score = "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1.0\n"
    (tmp_path / "constant.py").write_text(score)
    words = ("transfer_queue.filter_groups=zero_variance", "transfer_queue.max_filtered_steps=1")
    words += ("groups_per_step=2", "group_size=2", f"agent.reward={tmp_path / 'constant.py'}:compute_score")
    run = start_run("filtered", *words)
    assert run.process.wait(600) == 1
    (ended,) = run.rows("ended.json")
    assert "trainer stopped the run: TooManyFiltered" in ended["why"]
    assert run.summary()["restarts"]["trainer"] == 0
