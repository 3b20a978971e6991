"""A whole run on a real Ray cluster of several nodes, while actors, a whole node and the counts of roles change."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.deploy.conftest import LivingRun, assert_accounts_balance, assert_nothing_left, held_by
from tests.deploy.placements.ray.conftest import Node, RayCluster

from penstock.deploy import ConfigError
from penstock.deploy.placements.ray.cluster import connect
from penstock.trainer import CORES_VARIABLE

pytestmark = [
    pytest.mark.ray,
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.redis,
    pytest.mark.bwrap,
    pytest.mark.torch,
    pytest.mark.timeout(1500),
]

TOKEN = "the-runs-own-token-and-nobody-elses"
STEPS = 12
"""So many that those after the last kill need every role again: admission allows three steps ahead of the fourth."""
START_S = 600.0
"""A deadline for processes to be there, on a machine that may be busy; nothing is measured."""
SETTINGS = (
    f"trainer.steps={STEPS}",
    "trainer.checkpoint_every=3",
    "groups_per_step=4",
    "group_size=4",
    "data.eval_limit=8",
    "agent.workers=1",
)


def role_of(node: Node, *words: str) -> psutil.Process:
    """A role's first process on that node."""
    found = node.below("penstock.deploy.cli", *words)
    assert found, f"no {words} on this node"
    return found[0]


def status_of(cluster: RayCluster, role: str) -> dict[str, Any]:
    return cluster.penstock("ray", "status", "on-ray")["roles"][role]


def another(run: LivingRun, node: Node, role: psutil.Process) -> psutil.Process:
    """The agent worker's next process; the one before it must be gone by then."""
    words = ("penstock.deploy.cli", "agent", "agent-0")
    run.wait_for(lambda: role.pid not in (found := [p.pid for p in node.below(*words)]) and bool(found), START_S)
    return node.below(*words)[0]


def seen(node: Node) -> list[int]:
    return [process.pid for process in node.below()]


def test_ray_run_keeps_secrets_and_releases_all(
    cluster: RayCluster, start_run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The cluster comes first: it must outlive the run, which stops in order when the test fails."""
    monkeypatch.setenv("PENSTOCK_TOKEN", TOKEN)
    node, hold = cluster.add(cpus=4), tmp_path / "hold"
    short = (*SETTINGS, "trainer.steps=3", "groups_per_step=2", *held_by(hold))
    run: LivingRun = start_run("on-ray", *short, "--on", "ray", "--ray-address", cluster.address)
    run.wait_for(lambda: run.steps() >= 1, START_S)
    hold.touch()
    assert "ray::" in " ".join(role_of(node, "agent", "agent-0").parent().cmdline()), "its actor's worker starts it"
    assert_secrets_stay(run, cluster)
    assert_on_loopback(cluster)
    assert role_of(node, "train").environ()[CORES_VARIABLE] == "1", "what its bundle has, of the node's 4"
    pids = [*run.pids(), *(process.pid for process in node.below("penstock.deploy.cli"))]
    hold.unlink()
    summary = run.finish()
    assert summary["steps"] == 3
    assert_accounts_balance(summary)
    assert summary["restarts"] == dict.fromkeys(("rollout-0", "agent-0", "trainer"), 0)
    assert_nothing_left(run, pids)
    assert not node.below("penstock.deploy.cli")
    assert_released(cluster)
    assert [name for name in ("connect.env", "ray.probe") if (run.root / name).exists()] == []


@pytest.mark.deep
def test_ray_actors_and_a_node_die_accounts_balance(cluster: RayCluster, start_run, tmp_path: Path) -> None:
    """The cluster comes first: it must outlive the run, which stops in order when the test fails."""
    hold = tmp_path / "hold"
    first = cluster.add(cpus=4)
    run: LivingRun = start_run("on-ray", *SETTINGS, *held_by(hold), "--on", "ray", "--ray-address", cluster.address)
    run.wait_for(lambda: run.steps() >= 1, START_S)
    hold.touch()
    second = cluster.add(cpus=4)

    role = role_of(first, "agent", "agent-0")
    worker = role.parent()
    role.kill()
    role = another(run, first, role)
    assert role.parent() == worker, "the actor started it again"
    run.wait_for(lambda: status_of(cluster, "agent-0") == {"state": "running on 127.0.0.1", "restarts": 1}, START_S)
    worker.kill()
    assert another(run, first, role).parent() != worker, "Ray made the actor again"

    shown = cluster.penstock("ray", "scale", "on-ray", "rollout=2")
    assert shown["count"] == {"rollout": 2, "agent": 1}
    assert "rollout-1" in shown["roles"]
    hold.unlink()
    run.wait_for(lambda: run.steps() >= 4, START_S)
    hold.touch()
    shown = cluster.penstock("ray", "scale", "on-ray", "rollout=1")
    assert shown["count"] == {"rollout": 1, "agent": 1}
    assert shown["roles"]["rollout-1"]["state"] == "stopped"
    pids = [*run.pids(), *seen(first)]
    first.kill()
    for role_again in ("train", "agent", "rollout"):
        run.wait_for(lambda words=role_again: bool(second.below("penstock.deploy.cli", words)), START_S)
    pids += seen(second)
    hold.unlink()
    summary = run.finish()

    assert summary["steps"] == STEPS
    assert_accounts_balance(summary)
    assert summary["staleness_max"] <= 2
    assert summary["restarts"]["trainer"] >= 1
    assert summary["restarts"]["agent-0"] >= 3
    assert summary["restarts"]["rollout-0"] >= 1
    assert "rollout-1" in summary["restarts"]
    assert_nothing_left(run, [pid for pid in pids if pid not in seen(second)])
    assert not second.below("penstock.deploy.cli")
    assert_released(cluster)


def assert_secrets_stay(run: LivingRun, cluster: RayCluster) -> None:
    """Neither what Ray keeps of actors nor what it writes down nor any command line holds them."""
    lines = (run.root / "connect.env").read_text()
    passwords = {word.partition("=")[2].strip("'") for word in lines.split() if "PASSWORD=" in word}
    assert TOKEN in lines
    assert len(passwords) == 5
    tables = cluster.python(
        "import ray; from ray._private import state; ray.init(address='auto', log_to_driver=False);"
        " print(state.actors(), state.state.placement_group_table(), ray.nodes(), state.jobs())"
    )
    assert tables.returncode == 0, tables.stderr
    assert "RoleActor" in tables.stdout
    commands = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    for told in (tables.stdout, cluster.text_of_logs(), *commands):
        assert not [secret for secret in (TOKEN, *passwords) if secret in told]


def assert_on_loopback(cluster: RayCluster) -> None:
    """Every port of Ray's own processes; what roles listen on is the recipe's."""
    listening = set()
    for process in cluster.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            if not process.name().startswith(("raylet", "gcs_server", "ray::")):
                continue
            sockets = process.net_connections("inet")
            listening |= {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}
    assert listening
    assert {ip.removeprefix("::ffff:") for ip in listening} <= {"127.0.0.1", "::1"}


def assert_released(cluster: RayCluster) -> None:
    """Ray has got back every CPU, and knows of no actor of the run that lives."""
    code = (
        "import ray, time; from ray._private import state; ray.init(address='auto', log_to_driver=False)\n"
        "def busy():\n"
        "    free, all = ray.available_resources().get('CPU', 0), ray.cluster_resources().get('CPU', 0)\n"
        "    alive = [a for a in state.actors().values() if a['State'] != 'DEAD']\n"
        "    return free != all or alive\n"
        "deadline = time.monotonic() + 90\n"
        "while busy() and time.monotonic() < deadline: time.sleep(0.2)\n"
        "raise SystemExit(str(busy()) if busy() else None)\n"
    )
    ended = cluster.python(code)
    assert ended.returncode == 0, ended.stderr[-2000:]


LOOP = """
import sys

from penstock.agent_loops import AgentLoopBase

if "agent" in sys.argv:
    raise ImportError("no agent worker can import it")

class Loop(AgentLoopBase):
    async def run(self, task): ...
"""


@pytest.mark.deep
def test_ray_failed_role_ends_the_run_with_its_log(cluster: RayCluster, start_run, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    node = cluster.add(cpus=3)
    loop = f"agent.loop={tmp_path / 'loop.py'}:Loop"
    run = start_run("doomed", *SETTINGS, loop, "--on", "ray", "--ray-address", cluster.address)
    assert run.process.wait(START_S) == 1
    log = run.log.read_text()
    assert "agent-0 stopped the run:" in log
    assert "no agent worker can import it" in log
    assert not node.below("penstock.deploy.cli")
    assert (run.root / "summary.json").exists()


@pytest.mark.parametrize("address", ["local", "ray://127.0.0.1:10001"])
def test_ray_address_of_no_cluster_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="--ray-address"):
        connect(address, "nowhere")
