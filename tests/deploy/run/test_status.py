"""`penstock status`: a living run, an ended one, one that is not there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.dashboard.living_run import LivingRun
from tests.dashboard.recorded import write_config, write_rows
from typer.testing import CliRunner, Result

from penstock.common import process_identity
from penstock.deploy import RunConnection, RunDir, app
from penstock.deploy.run.accounts import CostAccounts
from penstock.deploy.run.connection import connect_file
from penstock.transfer_queue import Fate, LedgerEntry, UsageReport

pytestmark = [pytest.mark.redis, pytest.mark.torch]


@pytest.fixture
async def living(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LivingRun]:
    monkeypatch.delenv("PENSTOCK_RUN", raising=False)
    async with LivingRun(tmp_path / "runs", "mine") as run:
        for _ in range(3):
            await run.step()
        await run._tell_servers()
        yield run


async def invoke(*words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, ["status", *words])


async def state_of(*words: str) -> dict:
    result = await invoke(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


async def test_a_living_run(living: LivingRun) -> None:
    (living.root / "roles.json").write_text('{"trainer": {"state": "running", "restarts": 2}}')
    state = await state_of("mine", "--runs-dir", str(living.root.parent))
    assert (state["alive"], state["step"], state["steps"], state["version"]) == (True, 3, 50, 3)
    assert state["eta_s"] == pytest.approx(47 * 2.0)
    assert state["reward"] == pytest.approx(1 - 0.8 * 0.9**2)
    assert (state["staleness_max"], state["trainer_waits"]) == (2, pytest.approx(0.25))
    assert [(s["server_id"], s["version"], s["lag"]) for s in state["servers"]] == [
        ("rollout-0", 3, 0),
        ("rollout-1", 2, 1),
    ]
    assert state["waits_s"] == {"trainer:batch": pytest.approx(1.5)}
    assert state["bound_groups"] == 3
    assert state["waiting"] == [
        "trainer: waits for groups, 0 of 1 are ready",
        "agent workers: wait for tasks, none is queued",
    ]
    assert state["roles"]["trainer"]["restarts"] == 2
    assert "rollout-1: version 3 refused, version 2 stays: no" in state["warning"]
    await living._submit(9)
    await living.queue.lease_episodes("agent-7", 4, 3)
    held = await state_of(str(living.root))
    assert held["workers"]["agent-7"] == 4
    assert held["waiting"][1] == "agent workers: run 4 episodes, 7 requests are in flight"
    page = (await invoke(str(living.root))).stdout
    for words in (
        "mine  running  step 3 of 50",
        "94 s left",
        "trainer running, 2 restarts",
        "rollout-1",
        "→ shipped 0",
    ):
        assert words in page, page


async def test_status_warns_of_flat_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_RUN", raising=False)
    write_config(tmp_path / "flat", "trainer: {steps: 9}\n")
    row = {"reward": 0.0, "reward_std": 0.0, "episodes": 4, "faults": {"no tool named python": 3}}
    write_rows(tmp_path / "flat", [{"step": step, "wall_s": 1.0, **row} for step in range(3)])
    state = await state_of(str(tmp_path / "flat"))
    assert "no tool named python (9 of 12 episodes)" in state["warning"]
    assert "warning   All rewards" in (await invoke(str(tmp_path / "flat"))).stdout


async def test_status_warns_of_no_solved_task(tmp_path: Path) -> None:
    write_config(tmp_path / "solved", "trainer: {steps: 9}\n")
    rewards = [(0.2, 0.4), (0.9, 0.3), (1.0, 0.0), (1.0, 0.0), (1.0, 0.0)]
    rows = [{"step": n, "wall_s": 1.0, "reward": mean, "reward_std": std} for n, (mean, std) in enumerate(rewards)]
    write_rows(tmp_path / "solved", rows)
    assert not (await state_of(str(tmp_path / "solved")))["warning"]


async def test_status_shows_where_the_cost_went(tmp_path: Path) -> None:
    root = tmp_path / "priced"
    write_config(root, "trainer: {steps: 9}\n")
    accounts = CostAccounts(root / "accounts.json")
    accounts.take(LedgerEntry(1, UsageReport("1", "rollout-0", {"train/0#0": {"tokens": 4.0}})), "")
    accounts.take(LedgerEntry(2, fate=Fate.TRAINED, episodes=[("train/0#0", 3)]), "")
    accounts.write()
    assert (await state_of(str(root)))["accounts"] == {"tokens": {"sampled again": 1, "trained": 3}}
    page = (await invoke(str(root))).stdout
    assert "tokens    75.0% trained, 25.0% sampled again" in page
    assert "accounts  since the start" in page, "other waits are of the newest steps"


async def test_status_and_its_advice_tell_one_share_of_waiting(tmp_path: Path) -> None:
    write_config(tmp_path / "waits", "trainer: {steps: 9}\n")
    waits_s = [9.0, 5.0, 2.0, 2.0]
    write_rows(tmp_path / "waits", [{"step": n, "wall_s": 10.0, "wait_s": s} for n, s in enumerate(waits_s)])
    page = (await invoke(str(tmp_path / "waits"))).stdout
    assert "trainer   30% of" in page
    assert "The trainer waits 30% of" in page


async def test_a_fine_tuning_shows_its_loss_and_nothing_of_rollouts(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "tuned")
    write_config(run.root, "trainer: {steps: 9}\n")
    write_rows(run.root, [{"step": step, "loss": 0.5 - 0.1 * step, "wall_s": 2.0} for step in range(3)])
    with connect_file(None, run):
        state = await state_of(str(run.root))
        assert (state["state"], state["eta_s"], state["advice"]) == ("running", 12.0, None)
        page = (await invoke(str(run.root))).stdout
    assert "learning  loss 0.3000" in page
    assert not {"reward", "staleness", "queue", "advice", "episodes"} & set(page.split()), page
    assert (await state_of(str(run.root)))["state"] == "interrupted"


async def test_a_run_that_ended_says_why(living: LivingRun) -> None:
    (living.root / "connect.env").unlink()
    (living.root / "ended.json").write_text('{"version": 3, "why": "no progress for 9 s; stuck is agent-0: tools"}')
    (living.root / "summary.json").write_text(
        '{"restarts": {"agent-0": 1, "rollout-1": 5}, "roles_failed": ["rollout-1"]}'
    )
    state = await state_of(str(living.root))
    assert (state["alive"], state["step"], state["eta_s"]) == (False, 3, None)
    assert state["ended"] == "no progress for 9 s; stuck is agent-0: tools"
    assert state["roles"] == {
        "agent-0": {"state": "ended", "restarts": 1},
        "rollout-1": {"state": "failed", "restarts": 5},
    }
    page = (await invoke(str(living.root), "--watch")).stdout
    assert "ended     no progress for 9 s" in page, "a watch of what has ended ends"


async def test_a_run_whose_folder_is_elsewhere(
    living: LivingRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = RunConnection.from_lines((living.root / "connect.env").read_text())
    for name, value in link.environment().items():
        monkeypatch.setenv(name, value)
    state = await state_of("--runs-dir", str(tmp_path / "nothing"))
    assert (state["run"], state["alive"], state["step"], state["reward"]) == ("mine", True, 3, None)


async def test_without_a_name_the_runs_are_listed(living: LivingRun) -> None:
    """A killed run has a connect.env too: of a head that has ended."""
    runs = living.root.parent
    for name, steps in (("ended", 2), ("killed", 1)):
        write_config(runs / name, "trainer: {steps: 9}\n")
        write_rows(runs / name, [{"step": step, "reward": 0.5} for step in range(steps)])
    (runs / "ended" / "ended.json").write_text('{"version": 2, "why": "no progress"}')
    (runs / "killed" / "connect.env").write_text(f"# head: {process_identity()}0\n")
    write_config(runs / "mine-eval", "trainer: {steps: 9}\n")
    (runs / "mine-eval" / "settings.json").write_text("{}")
    (runs / "mine-eval" / "summary.json").write_text('{"tasks": 8, "avg@4": 0.75, "pass@1": 0.75}')
    listed = (await state_of("--runs-dir", str(runs)))["runs"]
    states = {one["run"]: (one["state"], one["step"], one["steps"]) for one in listed}
    assert states == {
        "mine": ("running", 3, 50),
        "ended": ("finished", 2, 9),
        "killed": ("interrupted", 1, 9),
        "mine-eval": ("interrupted", None, None),
    }
    assert {one["run"]: one["reward"] for one in listed}["mine-eval"] == 0.75
    lines = (await invoke("--runs-dir", str(runs))).stdout.splitlines()
    assert [line.split()[:5] for line in lines if "ended" in line] == [["ended", "finished", "2", "of", "9"]]
    assert "RUN is missing" in (await invoke("--watch", "--runs-dir", str(runs))).stderr
    assert "penstock run" in (await invoke("--runs-dir", str(runs / "nothing"))).stdout
