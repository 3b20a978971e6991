"""The comparison with TRL: one schedule for both, what a program has cost until its goal, and ratios of that."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.support.child import ROOT
from benchmarks.support.compare_figures import FULLY_ASYNC, TRL, TRL_IN_PROCESS, figures_of, ratios_of
from benchmarks.support.compare_run import Program, ProgramFailed, Progress, follow
from benchmarks.support.compare_sides import (
    CALCULATOR,
    OtherSchedule,
    TrlProgram,
    check_schedule,
    plan_of,
    sums,
    tools_of,
)
from benchmarks.support.grpo_plan import GrpoPlan, GrpoStep, TrlJob, goal_reached, read_rows
from benchmarks.support.trl_place import FOLDER, trl_environment
from penstock.agent_loops.chat import chat_of
from penstock.deploy import app
from penstock.tools import ToolResult
from penstock.tools.parsers import ToolCall
from penstock.trainer import learning_rate

Measure = Callable[..., Awaitable[dict[str, Any]]]
HAS_TRL = (FOLDER / "complete").exists()
LEARNS = (0.3, 0.8, 0.9, 0.95, 0.9)


def progress(pace_s: float, cpu_s: float, rewards: tuple[float, ...] = LEARNS) -> Progress:
    """Each step takes `pace_s` and `cpu_s`, the first as long again."""
    steps = tuple(GrpoStep(pace_s * (n + 2), reward, 64, 1000, 1e-4) for n, reward in enumerate(rewards))
    total = cpu_s * (len(rewards) + 1)
    return Progress(steps, total, 2 * cpu_s, total + 1, 0.9)


def test_the_goal_is_a_mean_of_three_steps() -> None:
    assert not goal_reached([1.0, 1.0], 0.9)
    assert not goal_reached([1.0, 0.8, 0.8], 0.9)
    assert goal_reached([0.0, 1.0, 0.8, 0.9], 0.9)


def test_ratios_are_of_the_same_seed_and_start_included() -> None:
    runs = {
        FULLY_ASYNC: {0: progress(1.0, 2.0), 1: progress(2.0, 2.0), 2: progress(3.0, 2.0)},
        TRL: {seed: progress(2.0, 4.0) for seed in range(3)},
        TRL_IN_PROCESS: {0: progress(4.0, 1.0)},
    }
    ratios = ratios_of(runs)
    assert ratios["wall_to_goal_over_trl"] == 1.0
    assert ratios["wall_to_goal_over_trl_in_process"] == 0.25
    assert ratios["cpu_per_step_over_trl"] == ratios["cpu_per_later_step_over_trl"] == 0.5
    found = figures_of(runs)[FULLY_ASYNC]
    assert (found["reached"], found["wall_s"], found["cpu_s"]) == (3, 12.0, 12.0)
    assert (found["cpu_per_step"], found["cpu_per_later_step"]) == (2.4, 2.0)
    assert (found["episodes"], found["sampled_tokens"]) == (320, 5000)
    assert list(found["seeds"]) == ["0", "1", "2"]


def test_a_goal_that_ours_missed_has_no_ratio_and_one_that_trl_missed_no_part_in_it() -> None:
    misses = progress(1.0, 1.0, (0.3,) * 5)
    good = {0: progress(1.0, 1.0), 1: progress(1.0, 1.0)}
    missed_by_trl = ratios_of({FULLY_ASYNC: good, TRL: {0: misses, 1: progress(2.0, 1.0)}})
    assert missed_by_trl["wall_to_goal_over_trl"] == 0.5
    missed_by_ours = ratios_of({FULLY_ASYNC: {0: misses, 1: good[1]}, TRL: good})
    assert missed_by_ours["wall_to_goal_over_trl"] is None
    assert missed_by_ours["cpu_per_step_over_trl"] == 1.0
    assert set(ratios_of({}).values()) == {None}


WRITER = """
import json, sys, time
log = open(sys.argv[1], "a")
for reward in json.loads(sys.argv[2]):
    end = time.process_time() + 0.2
    while time.process_time() < end: pass
    log.write(json.dumps({"reward": reward}) + "\\n"); log.flush()
sys.exit(int(sys.argv[3]))
"""


def writer(folder: Path, rewards: list[float], status: int = 0) -> Program:
    def step_of(row: Mapping[str, Any], wall_s: float) -> GrpoStep:
        return GrpoStep(wall_s, row["reward"], 64, 100, 1e-4)

    command = [sys.executable, "-c", WRITER, str(folder / "log"), json.dumps(rewards), str(status)]
    return Program(command, {}, folder / "log", step_of, folder / "output")


def test_a_program_is_followed_to_its_goal(tmp_path: Path) -> None:
    run = follow(writer(tmp_path, [0.5, 0.9, 0.9, 0.9, 0.1]), 60.0, 0.9)
    assert [step.reward for step in run.steps] == [0.5, 0.9, 0.9, 0.9], "what comes after the goal does not count"
    assert run.reached
    assert 0 < run.cpu_first_s <= run.cpu_s <= run.cpu_end_s
    assert run.cpu_end_s > 1.0, "five times 0.2 s of its own CPU, however long they take on a loaded machine"


def test_a_program_that_fails_is_no_measurement(tmp_path: Path) -> None:
    with pytest.raises(ProgramFailed, match="exit status 3"):
        follow(writer(tmp_path, [0.5], status=3), 60.0, 0.9)


def test_a_step_of_another_schedule_is_refused(tmp_path: Path) -> None:
    config, _ = CALCULATOR.config([], 0, 50, tmp_path)
    plan = plan_of(config, tmp_path / "rows", 0.9)
    rates = plan.learning_rates
    assert rates == tuple(learning_rate(config.trainer, step) for step in range(50))
    good = tuple(GrpoStep(1.0, 0.5, 64, 100, rate) for rate in rates[:3])
    check_schedule("trl", 0, Progress(good, 1.0, 1.0, 1.0, 0.9), plan)
    for wrong in (GrpoStep(1.0, 0.5, 32, 100, rates[3]), GrpoStep(1.0, 0.5, 64, 100, rates[4])):
        with pytest.raises(OtherSchedule, match="step 3"):
            check_schedule("trl", 0, Progress((*good, wrong), 1.0, 1.0, 1.0, 0.9), plan)


@pytest.mark.torch
def test_a_job_travels_with_the_prompts_of_our_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    program = TrlProgram(TRL, CALCULATOR, str(FOLDER), boxed=True, steps=5, timeout_s=60.0)
    job = program.job(0, tmp_path)
    assert TrlJob.read(job.dump()) == job
    assert GrpoPlan.read(job.plan.dump()) == job.plan
    assert job.command is not None
    assert job.command[0] == "bwrap"
    rows = read_rows(job.plan.rows)
    assert len(rows) == 4096
    config, _ = CALCULATOR.config([], 0, 5, tmp_path)
    ids = chat_of(config.model, config.agent).prompt_ids(rows[7]["prompt"], tools_of(config))
    assert rows[7]["prompt_ids"] == list(ids)


@pytest.mark.torch
def test_a_pretrained_models_job_has_its_recipes_reward_and_no_tool(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    task = sums(str(ROOT / "recipes/calculator/model"))
    job = TrlProgram(TRL, task, str(FOLDER), boxed=True, steps=5, timeout_s=60.0).job(0, tmp_path)
    assert job.tool is None
    assert Path(job.reward).name == "sums.py"
    assert (job.plan.goal, job.plan.max_new_tokens, len(read_rows(job.plan.rows))) == (0.8, 12, 300)


TOKENS = """
import json, sys
from pathlib import Path
from benchmarks.support.grpo_plan import TrlJob, read_rows
from benchmarks.support.trl_grpo import StepLog, check_prompts, make_trainer
job = TrlJob.read(sys.argv[1])
rows = read_rows(job.plan.rows)
trainer = make_trainer(job, rows, StepLog(Path(job.log), job.plan.goal))
check_prompts(trainer, rows[:256])
print(json.dumps(trainer._get_tool_suffix_ids([{"role": "tool", "name": "python", "content": "1480047"}])))
"""


@pytest.mark.deep
@pytest.mark.torch
@pytest.mark.skipif(not HAS_TRL, reason="TRL is not there: scripts/setup-trl")
def test_trl_reads_the_prompts_of_a_task_without_a_tool(tmp_path: Path) -> None:
    task = sums("smollm2-135m")
    if not Path(task.config([], 0, 1, tmp_path)[0].model).is_dir():
        pytest.skip("SmolLM2 is not there: penstock model fetch smollm2-135m")
    job = TrlProgram(TRL, task, str(FOLDER), boxed=True, steps=5, timeout_s=60.0).job(0, tmp_path)
    beside_trl(TOKENS.partition("print(")[0], job, tmp_path)


def beside_trl(program: str, job: TrlJob, folder: Path) -> str:
    """Returns the output of a program that can import TRL."""
    environment = {**os.environ, **trl_environment(str(FOLDER)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, job.dump()]
    ended = subprocess.run(command, check=False, env=environment, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.deep
@pytest.mark.torch
@pytest.mark.skipif(not HAS_TRL, reason="TRL is not there: scripts/setup-trl")
def test_trl_reads_the_tokens_that_our_runs_read(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    job = TrlProgram(TRL_IN_PROCESS, CALCULATOR, str(FOLDER), boxed=False, steps=5, timeout_s=60.0).job(0, tmp_path)
    suffix = json.loads(beside_trl(TOKENS, job, tmp_path).splitlines()[-1])
    config, _ = CALCULATOR.config([], 0, 5, tmp_path)
    call = ToolCall("python", {"code": "print(round(4821*307,4))"}, "call_0")
    delta = list(chat_of(config.model, config.agent).render_tools([ToolResult("1480047")], [call]))
    assert suffix == delta[1:], "after the end of turn that the model sampled"


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.deep
@pytest.mark.redis
@pytest.mark.bwrap
@pytest.mark.skipif(not HAS_TRL, reason="TRL is not there: scripts/setup-trl")
async def test_both_programs_train_three_steps(measure: Measure) -> None:
    pytest.importorskip("transformers")
    measured = await measure(
        "compare",
        PENSTOCK_BENCH_SEEDS="0",
        PENSTOCK_BENCH_SIDES="fully_async,trl",
        PENSTOCK_BENCH_STEPS="3",
        PENSTOCK_BENCH_TRL=str(FOLDER),
    )
    assert measured["setup"]["trl"].startswith("trl==")
    ours, theirs = (measured["figures"][name] for name in (FULLY_ASYNC, TRL))
    for side in (ours, theirs):
        assert (side["steps"], side["episodes"], side["reached"]) == (3, 192, 0)
        assert 0 < side["cpu_first_step_s"] < side["cpu_s"] <= side["cpu_end_s"] * 1.02
        assert 3 * 64 < side["sampled_tokens"] < 3 * 64 * 80
    ratio = ours["seeds"]["0"]["cpu_per_step"] / theirs["seeds"]["0"]["cpu_per_step"]
    assert measured["ratio"]["cpu_per_step_over_trl"] == pytest.approx(ratio, rel=1e-2)
    assert measured["ratio"]["wall_to_goal_over_trl"] is None, "three steps do not reach the goal"


async def test_without_trl_there_are_no_ratios_over_it(measure: Measure) -> None:
    measured = await measure("compare", PENSTOCK_BENCH_SIDES="trl", PENSTOCK_BENCH_TRL="")
    assert "setup-trl" in measured["setup"]["trl"]
    assert measured["figures"] == {}
    assert set(measured["ratio"].values()) == {None}


async def test_a_model_of_the_command_line_is_the_one_that_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_BENCH_MODEL", "")  # what the command sets is undone
    monkeypatch.setenv("PENSTOCK_BENCH_SIDES", "trl")
    monkeypatch.setenv("PENSTOCK_BENCH_TRL", "")
    model = str(ROOT / "recipes/calculator/model")
    result = await asyncio.to_thread(CliRunner().invoke, app, ["bench", "compare", "--model", model, "--json"])
    assert result.exit_code == 0, result.output
    setup = json.loads(result.stdout)["setup"]
    assert (setup["model"], setup["recipe"]) == (model, "sums.py")
