"""Predictions of what was measured. The numbers are the sources'; the bounds are the promise of docs/how/scale.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.predictions import measure
from benchmarks.simulator.hardware import HOST_BYTES_PER_S
from benchmarks.simulator.local import local_case, predicted
from benchmarks.simulator.page import WITHIN_LOCAL, WITHIN_PUBLISHED, checked_tables, tables_in
from benchmarks.simulator.published import HOST_RATE_CASE, Calibration, host_bytes_per_s
from benchmarks.simulator.stated import Case, cases
from penstock.simulator import simulate
from penstock.simulator.measured import calibrate


@pytest.fixture(scope="module")
def checked() -> dict[str, Any]:
    return measure()["figures"]


@pytest.mark.deep
def test_measured_runs_are_predicted_within_the_bounds(checked: dict[str, Any]) -> None:
    """In verl's ablation on 128 GPUs each more stale setting is faster."""
    rows = {name: row for name, row in checked["published"].items() if not row["calibrates"]}
    assert len(rows) == len(cases()) - 1
    assert {name: row["error"] for name, row in rows.items() if row["error"] > WITHIN_PUBLISHED} == {}
    errors = [row["error"] for row in checked["local"].values() if row["counted"]]
    assert checked["largest_error_published"] == max(row["error"] for row in rows.values())
    assert checked["largest_error_local"] == max(errors) <= WITHIN_LOCAL
    order = ["verl-7b-64-64-staleness-0", "verl-7b-64-64-staleness-0.1", "verl-7b-64-64-staleness-0.3", "verl-7b-64-64"]
    for key in ("predicted", "published"):
        speedups = [checked["published"][name][key] for name in order]
        assert speedups == sorted(speedups)


def test_the_asynchronous_outcome_is_not_an_input() -> None:
    """Another published speed-up changes no prediction: both simulations are the same."""
    case = cases()["verl-7b-64-64"]
    told_otherwise = case.model_copy(update={"published": dict.fromkeys(case.published, 9.0)})
    assert Calibration(told_otherwise).asynchronous == Calibration(case).asynchronous


@pytest.mark.deep
def test_the_synchronous_row_is_met_by_construction(checked: dict[str, Any]) -> None:
    case = cases()["verl-one-step-off-megatron"]
    assert simulate(Calibration(case).synchronous).step_s == pytest.approx(
        case.stated.synchronous.phases.step_s, rel=0.01
    )


def test_the_rate_of_offloading_follows_from_its_case() -> None:
    assert host_bytes_per_s(cases()[HOST_RATE_CASE]) == pytest.approx(HOST_BYTES_PER_S, rel=0.02)


def test_a_drifting_baseline_is_compared_where_it_is_steady() -> None:
    """The 32-GPU run takes 494 s a step for 200 steps and twice as much later; the one of 64 GPUs never changes."""
    assert cases()["verl-7b-16-16"].window == 200
    assert cases()["verl-7b-32-32"].window == 400


def test_calibration_meets_the_local_run_that_it_is_made_on() -> None:
    case = local_case()
    for pair in case.pairs:
        run = case.run(pair.calibrated_on)
        found = simulate(predicted(run, calibrate(run)))
        assert found.step_s == pytest.approx(run.wall_s, rel=0.02)
        assert found.train_s == pytest.approx(run.train_s, rel=0.02)
        assert found.staleness_max <= run.max_staleness


@pytest.mark.parametrize("case", list(cases().values()), ids=lambda case: case.name)
def test_every_case_names_its_source_and_what_it_assumes(case: Case) -> None:
    assert case.source.startswith("https://")
    assert case.settings_from
    assert case.assumed


@pytest.mark.deep
def test_the_page_tells_the_errors_as_they_are(checked: dict[str, Any]) -> None:
    """`python -m benchmarks.simulator.page docs/how/scale.md` writes them."""
    tables = tables_in((Path(__file__).parents[2] / "docs/how/scale.md").read_text())
    assert {name: tables[name] for name in ("published", "local")} == checked_tables(checked)
