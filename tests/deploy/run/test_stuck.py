"""Which part is named when a run stands still."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.deploy.run.stall import LocalRole, Snapshot, diagnose_stall
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
    "held": (snapshot(roles=(*ROLES[:3], LocalRole("trainer", running=True, held=True))), "trainer", "SIGSTOP"),
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
    scene, part, why = CASES[case]
    cause = diagnose_stall(scene)
    assert (cause.part, why in cause.why) == (part, True), cause
