"""Short whole runs on the real parts: real redis, engine, sandbox, trainer."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.deploy.conftest import RECIPE, SMALL, LivingRun, assert_accounts_balance, assert_nothing_left, held_by
from tests.deploy.telemetry.trace_format import check
from typer.testing import CliRunner

from penstock.deploy import app, load_config
from penstock.deploy.preflight.settings import check_engine

DOCS = Path(__file__).parents[3] / "docs/guide/monitoring.md"
pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch, pytest.mark.timeout(1500)]

ROLES = 4
"""Processes of the default run beside its head: a server, two workers, a trainer."""
FIRST_STEP_KL = 1e-4
"""Between engine and trainer in float32, before anything is learned: they are the same policy."""

STEPS = 4
"""Enough that the last trains on episodes of published weights, and that a server which skips versions loads two."""
SHORT = (f"trainer.steps={STEPS}", *SMALL[:-1])
LEFT = (
    *("config.yaml", "metrics.jsonl", "timeline.jsonl", "weight_updates.jsonl", "steps.jsonl", "eval.jsonl"),
    *("reward.png", "tensorboard", "final_model"),
)


def assert_sound(summary: dict[str, Any]) -> None:
    """Weights arrive, tokens are young enough and exact, and the accounts balance."""
    assert summary["weight_updates"] >= 2
    assert summary["staleness_max"] <= 2
    assert summary["logprob_abs_diff_mean"] <= 1e-3
    assert summary["kl_first_step"] <= FIRST_STEP_KL
    assert_accounts_balance(summary)


def test_run_leaves_what_is_promised(start_run) -> None:
    """The default settings; everything that one short run can prove."""
    run = start_run("short", *SHORT)
    run.wait_for(lambda: len(run.pids("penstock.deploy.cli")) >= ROLES)
    pids = run.pids()
    summary = run.finish()
    assert (summary["steps"], summary["ended"]) == (STEPS, f"all {STEPS} steps are trained")
    assert_sound(summary)
    assert summary["eval_episodes"] == 8
    assert [name for name in LEFT if not (run.root / name).exists()] == []
    assert [row["step"] for row in run.rows("metrics.jsonl")] == list(range(STEPS))
    episodes = [episode for row in run.rows("steps.jsonl") for episode in row["episodes"]]
    assert len(episodes) == len(set(episodes)) == STEPS * 2 * 4
    assert_nothing_left(run, pids)
    gone = ("connect.env", "metrics.token", "prometheus-targets.json", "roles.json")
    assert [name for name in gone if (run.root / name).exists()] == []
    assert_the_run_can_be_drawn(run)


def test_run_synchronous_over_http_resumes_after_ctrl_c(start_run, tmp_path: Path) -> None:
    """Every setting another value: the README's loop by dotted path, an evaluation server, weights over HTTP."""
    folder = tmp_path / "my_agents"
    folder.mkdir()
    example = Path(__file__).parents[3] / "recipes" / "own_loop" / "agent.py"
    (folder / "shortest.py").write_text(example.read_text())
    words = (
        *(*SHORT, "max_staleness=sync", "rollout.evaluation_server=true", "trainer.eval_every=1", "agent.workers=1"),
        *("rollout.weight_transport=http", "rollout.weights_full_every=3", "agent.loop=my_agents.shortest:MyAgent"),
    )
    run = start_run("other", *words, "trainer.steps=100000", cwd=tmp_path)  # until Ctrl-C
    run.wait_for(lambda: run.steps() >= 1)
    assert_every_role_exports_metrics(run)
    pids = run.pids()
    assert {ip for pid in pids for ip in listens_on(pid)} == {"127.0.0.1"}
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(90) == 130
    assert_nothing_left(run, pids)
    steps = run.steps() + 2
    summary = start_run("other", *words, f"trainer.steps={steps}", cwd=tmp_path, resume=True).finish()
    assert f"found: run {(run.root / 'run.id').read_text().strip()}, begun" in run.log.read_text()
    assert (summary["steps"], summary["staleness_max"], summary["lives"]) == (steps, 0, 2)
    assert_sound(summary)
    evaluations = run.rows("eval.jsonl")
    assert evaluations[-1]["version"] == steps
    assert all(one["version_oldest"] == one["version_newest"] >= one["version"] for one in evaluations)
    first = min((run.root / "trajectories").glob("*.jsonl"))
    assert run.rows(f"trajectories/{first.name}")[0]["extra"]["agent"] == "MyAgent"


def assert_every_role_exports_metrics(run: LivingRun) -> None:
    """Prometheus finds and asks the roles of a running run; `docs/guide/monitoring.md` knows every name."""
    targets, token = run.root / "prometheus-targets.json", run.root / "metrics.token"
    missing = {
        "head": "penstock_queue_version",
        "trainer": "penstock_trainer_metric",
        "rollout-0": "penstock_rollout_policy_version",
        "rollout-eval": "penstock_rollout_policy_version",
        "agent-0": "penstock_agent_episodes_total",
    }
    exported = set[str]()
    with httpx.Client(timeout=30) as client:

        def all_have_answered() -> bool:
            for target in json.loads(targets.read_text()) if targets.exists() else ():
                name, headers = target["labels"]["name"], {"Authorization": f"Bearer {token.read_text()}"}
                if name in missing:
                    text = client.get(f"http://{target['targets'][0]}/metrics", headers=headers).text
                    found = set(re.findall(r"^# TYPE (penstock_\w+) \w+$", text, re.MULTILINE))
                    exported.update(metric for metric in found if not metric.endswith("_created"))
                    if missing[name] in found:
                        del missing[name]
            return not missing

        run.wait_for(all_have_answered)
    documented = set(re.findall(r"^\| `(penstock_\w+)` \|", DOCS.read_text(), re.MULTILINE))
    assert exported <= documented


def assert_the_run_can_be_drawn(run: LivingRun) -> None:
    out = run.root / "trace.json"
    made = CliRunner().invoke(app, ["trace", str(run.root), "--out", str(out)])
    assert made.exit_code == 0, made.output
    found = check(json.loads(out.read_text()))
    assert {"trainer", "evaluation", "rollout-0"} < set(found)
    assert [name for name in found["trainer"] if name.startswith("step")] == [f"step {n}" for n in range(STEPS)]
    assert {"wait", "score", "advantages", "update", "announce", "record", "save"} <= set(found["trainer"])
    assert {"fetch", "pause", "load"} <= set(found["rollout-0"])
    episodes = [name for worker in set(found) & {"agent-0", "agent-1"} for name in found[worker]]
    assert {"turn 0", "model", "reward"} <= set(episodes)


STOCK = [pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("sglang", marks=pytest.mark.sglang)]


@pytest.mark.deep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", STOCK)
def test_run_with_a_stock_engine(start_run, engine: str) -> None:
    found = check_engine(load_config(RECIPE, [f"rollout.engine={engine}"]))
    if not found.ok:
        pytest.skip(f"{found.found}: {found.fix}")
    patience = ("rollout.start_timeout_s=540", "stall_timeout_s=580")  # a first start compiles SGLang's bytecode
    summary = start_run(f"on-{engine}", *SHORT, *patience, f"rollout.engine={engine}").finish()
    assert summary["steps"] == STEPS
    assert_sound(summary)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("transport", "ranks", "receive"),
    [("http", 2, "staged"), ("broadcast", 1, "staged"), ("broadcast", 2, "staged"), ("broadcast", 2, "in_place")],
)
def test_run_weights_over_the_network_on_loopback(
    start_run, tmp_path: Path, transport: str, ranks: int, receive: str
) -> None:
    hold = tmp_path / "hold"
    overrides = (f"rollout.weight_transport={transport}", "rollout.weights_full_every=3", "rollout.servers=2")
    words = (*overrides, f"rollout.broadcast_receive={receive}", f"trainer.ranks={ranks}", *held_by(hold))
    run = start_run(f"{transport}-{ranks}-{receive}", *SHORT, *words)
    run.wait_for(lambda: run.steps() >= 1)
    hold.touch()
    pids = run.pids()
    listening = {ip for pid in pids for ip in listens_on(pid)}
    hold.unlink()
    summary = run.finish()
    assert summary["steps"] == STEPS
    assert_sound(summary)
    assert listening == {"127.0.0.1"}
    assert_nothing_left(run, pids)
    # Whether a server waits when a version begins is chance on a busy machine; tests/weight_sync fixes who does.
    found = re.findall(r"broadcast \S+: version \d+, \d of \d workers", (run.root / "logs" / "trainer.log").read_text())
    assert bool(found) == (transport == "broadcast")


def listens_on(pid: int) -> set[str]:
    try:
        sockets = psutil.Process(pid).net_connections("inet")
    except psutil.NoSuchProcess:
        return set()
    return {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}


def test_run_stopped_before_its_roles_leaves_nothing(start_run) -> None:
    run = start_run("early", *SHORT)
    run.wait_for((run.root / "redis").exists)
    pids = run.pids()
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(90) == 130
    assert "continue with: penstock run" in run.log.read_text()
    assert not (run.root / "connect.env").exists()
    assert_nothing_left(run, pids)
