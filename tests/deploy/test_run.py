"""Short whole runs on the real parts: real redis, engine, sandbox, trainer."""

import json
import re
import signal
from pathlib import Path

import httpx
import psutil
import pytest
from tests.deploy.conftest import RECIPE, LivingRun, assert_accounts_balance, assert_nothing_left
from tests.deploy.run_trace.checked import check
from typer.testing import CliRunner

from penstock.deploy import app, load_config
from penstock.deploy.preflight import check_engine

DOCS = Path(__file__).parents[2] / "docs" / "telemetry.md"
pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch, pytest.mark.timeout(1500)]

FIRST_STEP_KL = 1e-4
"""Between engine and trainer in float32, before anything is learned: they are the same policy."""

SHORT = ("trainer.steps=4", "groups_per_step=4", "group_size=4", "data.eval_limit=16", "trainer.checkpoint_every=2")


def test_a_short_run_leaves_what_is_promised(start_run) -> None:
    run = start_run("short", *SHORT)
    run.wait_for(lambda: run.steps() >= 1)
    pids = run.pids()
    assert_every_role_tells_its_numbers(run)
    summary = run.finish()
    assert summary["steps"] == 4
    assert summary["weight_updates"] >= 3
    assert summary["staleness_max"] <= 2
    assert summary["logprob_abs_diff_mean"] <= 1e-3
    assert summary["eval_episodes"] == 16
    assert summary["kl_first_step"] <= FIRST_STEP_KL
    assert summary["ended"] == "all 4 steps are trained"
    assert_accounts_balance(summary)
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "timeline.jsonl",
        "weight_updates.jsonl",
        "steps.jsonl",
        "eval.jsonl",
        "reward.png",
        "tensorboard",
        "final_model",
    ):
        assert (run.root / name).exists(), name
    rows = [json.loads(line) for line in (run.root / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    episodes = [e for line in (run.root / "steps.jsonl").read_text().splitlines() for e in json.loads(line)["episodes"]]
    assert len(episodes) == len(set(episodes)) == 4 * 4 * 4
    assert_nothing_left(run, pids)
    for name in ("connect.env", "metrics.token", "prometheus-targets.json"):
        assert not (run.root / name).exists(), name
    assert_the_run_can_be_drawn(run)


def assert_every_role_tells_its_numbers(run: LivingRun) -> None:
    """As Prometheus finds and asks them: `docs/telemetry.md` knows every name."""
    targets = json.loads((run.root / "prometheus-targets.json").read_text())
    headers = {"Authorization": f"Bearer {(run.root / 'metrics.token').read_text()}"}
    told = {}
    for target in targets:
        text = httpx.get(f"http://{target['targets'][0]}/metrics", headers=headers, timeout=30).text
        names = set(re.findall(r"^# TYPE (penstock_\w+) \w+$", text, re.MULTILINE))
        told[target["labels"]["name"]] = {name for name in names if not name.endswith("_created")}
    assert set(told) == {"head", "trainer", "rollout-0", "agent-0", "agent-1"}
    documented = set(re.findall(r"^\| `(penstock_\w+)` \|", DOCS.read_text(), re.MULTILINE))
    assert set().union(*told.values()) <= documented
    for role, name in (("head", "queue_version"), ("trainer", "trainer_metric"), ("agent-0", "agent_episodes_total")):
        assert f"penstock_{name}" in told[role]


def assert_the_run_can_be_drawn(run: LivingRun) -> None:
    out = run.root / "trace.json"
    made = CliRunner().invoke(app, ["trace", str(run.root), "--out", str(out)])
    assert made.exit_code == 0, made.output
    found = check(json.loads(out.read_text()))
    assert {"trainer", "evaluation", "rollout-0"} < set(found)
    assert [name for name in found["trainer"] if name.startswith("step")] == [f"step {n}" for n in range(4)]
    assert {"wait", "score", "advantages", "update", "announce", "record", "save"} <= set(found["trainer"])
    assert {"fetch", "pause", "load"} <= set(found["rollout-0"])
    episodes = [name for worker in set(found) & {"agent-0", "agent-1"} for name in found[worker]]
    assert {"turn 0", "model", "reward"} <= set(episodes)


STOCK = [pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("sglang", marks=pytest.mark.sglang)]


@pytest.mark.parametrize("engine", STOCK)
def test_a_stock_server_is_one_override_away(start_run, engine: str) -> None:
    found = check_engine(load_config(RECIPE, [f"rollout.engine={engine}"]))
    if not found.ok:
        pytest.skip(found.mend)
    summary = start_run(f"on-{engine}", *SHORT, f"rollout.engine={engine}").finish()
    assert summary["steps"] == 4
    assert summary["weight_updates"] >= 3
    assert summary["staleness_max"] <= 2
    assert summary["logprob_abs_diff_mean"] <= 1e-3
    assert summary["kl_first_step"] <= FIRST_STEP_KL
    assert_accounts_balance(summary)


def test_synchronous_is_the_same_recipe_with_another_value(start_run) -> None:
    """With a server for evaluations beside it: each of them is sampled by one version, while training goes on."""
    run = start_run("sync", *SHORT, "max_staleness=sync", "rollout.evaluation_server=true", "trainer.eval_every=1")
    summary = run.finish()
    assert summary["staleness_max"] == 0
    assert_accounts_balance(summary)
    evaluations = [json.loads(line) for line in (run.root / "eval.jsonl").read_text().splitlines()]
    assert evaluations[-1]["version"] == 4
    assert all(one["version_oldest"] == one["version_newest"] >= one["version"] for one in evaluations)


@pytest.mark.parametrize(("transport", "ranks"), [("http", 2), ("collective", 1)])
def test_weights_may_come_over_the_network_and_all_that_listens_does_so_on_loopback(
    start_run, transport: str, ranks: int
) -> None:
    overrides = (f"rollout.weight_transport={transport}", "rollout.weights_full_every=3", "rollout.servers=2")
    run = start_run(transport, *SHORT, *overrides, f"trainer.ranks={ranks}")
    run.wait_for(lambda: run.steps() >= 1)
    pids = run.pids()
    listening = {ip for pid in pids for ip in listens_on(pid)}
    summary = run.finish()
    assert summary["steps"] == 4
    assert summary["weight_updates"] >= 3
    assert summary["logprob_abs_diff_mean"] <= 1e-3
    assert_accounts_balance(summary)
    assert listening == {"127.0.0.1"}
    assert_nothing_left(run, pids)
    held = re.findall(r"round \S+: (\d) of \d servers", (run.root / "logs" / "trainer.log").read_text())
    assert any(int(servers) for servers in held) == (transport == "collective")


def listens_on(pid: int) -> set[str]:
    try:
        sockets = psutil.Process(pid).net_connections("inet")
    except psutil.NoSuchProcess:
        return set()
    return {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}


def test_ctrl_c_ends_every_process_and_the_run_goes_on_later(start_run) -> None:
    run = start_run("stopped", *SHORT, "trainer.steps=6")
    run.wait_for(lambda: run.steps() >= 2)
    pids = run.pids()
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(90) == 130
    assert_nothing_left(run, pids)
    summary = start_run("stopped", *SHORT, "trainer.steps=6", resume=True).finish()
    assert summary["steps"] == 6
    assert_accounts_balance(summary)


def test_a_run_that_is_told_to_stop_before_its_roles_are_there_leaves_nothing(start_run) -> None:
    run = start_run("early", *SHORT)
    run.wait_for((run.root / "redis").exists)
    pids = run.pids()
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(90) == 130
    assert "go on with: penstock run" in run.log.read_text()
    assert not (run.root / "connect.env").exists()
    assert_nothing_left(run, pids)


def test_an_own_loop_by_dotted_path(start_run, tmp_path: Path) -> None:
    """The loop of the README, in a folder of its own, outside of the package."""
    folder = tmp_path / "my_agents"
    folder.mkdir()
    example = Path(__file__).parents[2] / "recipes" / "own_loop" / "agent.py"
    (folder / "shortest.py").write_text(example.read_text())
    summary = start_run("own", *SHORT, "agent.loop=my_agents.shortest:MyAgent", cwd=tmp_path).finish()
    assert summary["steps"] == 4
    assert_accounts_balance(summary)
    trajectories = sorted((tmp_path / "own" / "trajectories").glob("*.jsonl"))
    assert json.loads(trajectories[0].read_text().splitlines()[0])["extra"]["agent"] == "MyAgent"
