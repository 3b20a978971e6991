"""`penstock simulate --from RUN`: rates of a run, and changes of its setup. The run here is itself a simulated one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.deploy import app
from penstock.simulator import BadSetup, Simulation, changed, predict_change, simulate
from penstock.simulator.measured import ADMISSION_S, SKIPPED, MeasuredRun, Rates, calibrate, simulation

RATES = Rates(start_s=0.02, token_s=0.002, trained_token_s=0.0002)
RUN = MeasuredRun(
    name="made",
    **{"max_staleness": 1, "group_size": 4, "groups_per_step": 4, "workers": 1, "concurrency": 16},
    **{"cores": 2, "steps": 8, "wall_s": 0, "train_s": 0, "publish_s": 0.05, "call_s": 0, "tool_s": 0.05},
    **{"turns": 2.0, "sampled_tokens": 30.0, "prompt_tokens": 40.0, "observation_tokens": 10.0},
)


def write_run(folder: Path) -> Simulation:
    """The files of a run whose steps took what `RATES` give; returns its setup."""
    config = simulation(RUN, RATES)
    result = simulate(config)
    folder.mkdir()
    (folder / "config.yaml").write_text(
        "name: made\nmax_staleness: 1\ngroup_size: 4\ngroups_per_step: 4\n"
        "agent: {workers: 1, concurrency: 16, max_response_tokens: 60}\n"
    )
    row = {"wall_s": result.step_s, "train_s": result.train_s, "publish_s": RUN.publish_s, "num_turns_mean": 2.0}
    row |= {"episode/llm_latency_s": result.calling_s, "episode/tool/python_s": 0.05, "sampled_length_mean": 30.0}
    row |= {
        "response_length_mean": 40.0,
        "tokens": 16 * 80,
        "episodes": 16,
        "length_decile/5": 40,
        "length_decile/9": 40,
    }
    (folder / "metrics.jsonl").write_text(f"{json.dumps(row)}\n" * (SKIPPED + 8))
    return config


@pytest.mark.parametrize(
    "overrides", [[], ["max_staleness=0"], ["groups_per_step=2"], ["group_size=8"], ["rollout.in_flight=4"]]
)
def test_a_change_is_predicted_from_the_runs_own_figures(tmp_path: Path, overrides: list[str]) -> None:
    truth = write_run(tmp_path / "made")
    prediction = predict_change(tmp_path / "made", overrides, cores=2)
    assert prediction.result.step_s == pytest.approx(simulate(changed(truth, overrides)).step_s, rel=0.05)
    low, high = prediction.step_s
    assert low <= high
    assert prediction.config.weights.sync_s == pytest.approx(0.05 + ADMISSION_S)


def test_the_rates_are_those_that_made_the_run() -> None:
    result = simulate(simulation(RUN, RATES))
    times = {"wall_s": result.step_s, "train_s": result.train_s, "call_s": result.calling_s}
    rates = calibrate(RUN.model_copy(update=times))
    assert rates.trained_token_s == pytest.approx(RATES.trained_token_s, rel=0.02)
    assert rates.token_s == pytest.approx(RATES.token_s, rel=0.05)


def test_the_command_compares_the_change_with_the_run(tmp_path: Path) -> None:
    write_run(tmp_path / "made")
    words = ["simulate", "--from", "made", "--runs-dir", str(tmp_path)]
    answer = CliRunner().invoke(app, [*words, "max_staleness=0"])
    assert answer.exit_code == 0, answer.output
    measured, simulated, ratio, *_ = answer.stdout.splitlines()
    assert measured.startswith("measured        step ")
    assert simulated.endswith(": max_staleness=0")
    assert float(ratio.split()[3]) > 1.0
    figures = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["figures"]
    low, high = figures["step_s_interval"]
    assert low <= figures["step_s"] * 1.001  # simulated times: they depend on no machine
    assert figures["step_s"] <= high * 1.001
    refused = CliRunner().invoke(app, [*words, "max_stalenes=0"])
    assert (refused.exit_code, "unknown key max_stalenes" in refused.output) == (2, True)
    assert CliRunner().invoke(app, ["simulate"]).exit_code == 2


def test_a_folder_with_too_few_steps_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "made")
    file = tmp_path / "made" / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[: SKIPPED + 1]))
    with pytest.raises(BadSetup, match="5 steps; the first 4 are not counted"):
        predict_change(tmp_path / "made", [], cores=2)
