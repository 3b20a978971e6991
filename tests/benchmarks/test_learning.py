"""The learning benchmark: a real run of each kind is launched and kept, and figures come from what is kept."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.far_python import FarPython
from benchmarks.support.learning_run import (
    Common,
    Curve,
    LearningRun,
    figures_of,
    finished,
    ratios_of,
    reward_at_end,
    smoothed,
    wall_to,
)
from penstock.tools import PythonTool

Measure = Callable[..., Awaitable[dict[str, Any]]]
IS = "truncated_is"
SMALL = {
    "PENSTOCK_BENCH_STEPS": "2",
    "PENSTOCK_BENCH_GROUPS": "2",
    "PENSTOCK_BENCH_GROUP_SIZE": "2",
    "PENSTOCK_BENCH_TOOL_MEDIAN_S": "0.02",
}


def curve(seconds_per_step: float, rewards: list[float]) -> Curve:
    walls = tuple(seconds_per_step * (step + 1) for step in range(len(rewards)))
    return Curve(
        walls,
        tuple(rewards),
        tuple(0.0 for _ in rewards),
        tuple(seconds_per_step / 4 for _ in rewards),
        tuple(640 for _ in rewards),
    )


LEARNS = [0.3, 0.5, 0.85, 0.95, 0.95, 1.0, 1.0, 1.0]


def test_a_reward_is_reached_when_the_mean_of_three_steps_is() -> None:
    assert smoothed([0.0, 0.6, 0.9, 0.9]) == pytest.approx([0.0, 0.3, 0.5, 0.8])
    # Means of three: 0.55, 0.767, 0.917 (steps 3 to 5)
    assert wall_to(curve(2.0, LEARNS)) == 10.0
    assert wall_to(curve(2.0, [1.0, 1.0])) is None, "two steps are no window"
    assert wall_to(curve(2.0, [0.5] * 20)) is None
    assert reward_at_end(curve(1.0, LEARNS)) == pytest.approx((0.95 + 0.95 + 3) / 5)


def test_ratios_are_medians_over_seeds_that_both_sides_have() -> None:
    curves = {LearningRun(0, IS, seed): curve(10.0, LEARNS) for seed in range(3)}
    curves |= {LearningRun(2, IS, seed): curve(pace, LEARNS) for seed, pace in ((0, 3.0), (1, 5.0), (2, 4.0))}
    curves |= {LearningRun(4, IS, 0): curve(2.0, [0.99 * one for one in LEARNS])}
    curves |= {LearningRun(4, "none", 1): curve(2.0, [0.5 * one for one in LEARNS])}
    ratios = ratios_of(curves)
    assert ratios["async_over_sync_wall_to_0.9"] == 0.4
    assert ratios["corrected4_over_sync_reward"] == 0.99
    assert ratios["uncorrected4_over_sync_reward"] == 0.5
    assert ratios["one_step_off_over_sync_wall_to_0.9"] is None
    found = figures_of(curves)
    assert list(found) == ["staleness_0", "staleness_2", "staleness_4"]
    assert list(found["staleness_4"]) == [IS, "none"]
    assert found["staleness_2"][IS]["seeds"] == 3
    assert found["staleness_2"][IS]["wall_to_0.9_s"] == 20.0
    assert found["staleness_2"][IS]["waited_share"] == 0.25
    assert found["staleness_4"]["none"]["seeds_that_reached_0.9"] == 0
    assert found["staleness_4"]["none"]["wall_to_0.9_s"] is None
    never = {**curves, LearningRun(2, IS, 0): curve(3.0, [0.4] * 8)}
    assert ratios_of(never)["async_over_sync_wall_to_0.9"] is None


@pytest.mark.torch
def test_the_picture_shows_each_staleness_and_correction(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.support.learning_picture import curves_by_label, draw_curves

    runs = [LearningRun(age, correction, seed) for age in (0, 4) for correction in (IS, "none") for seed in (0, 1)]
    cells = curves_by_label({run: curve(3.0, LEARNS) for run in runs})
    assert {label: len(seeds) for label, seeds in cells.items()} == dict.fromkeys(
        ("0", "0, not corrected", "4", "4, not corrected"), 2
    )
    draw_curves(cells, "max_staleness", tmp_path / "curves.svg")
    drawn = (tmp_path / "curves.svg").read_text()
    for label in ("step", "sampled tokens", "seconds", "4, not corrected"):
        assert f"<!-- {label} -->" in drawn


def test_only_the_calculator_has_a_far_tool() -> None:
    common = Common("hf", steps=2, groups=2, group_size=2, tool_median_s=0.5, tool_sigma=1.0, timeout_s=60.0)
    run = LearningRun(1, IS, 0)
    assert any(word.startswith("tools=") for word in run.overrides(common, Path("runs")))
    sums = replace(common, recipe="recipes/smollm2/sums.py")
    assert not any(word.startswith(("tools=", "data.train=")) for word in run.overrides(sums, Path("runs")))
    assert sums.digest() != common.digest()


async def test_the_far_tool_is_the_python_tool_for_the_model() -> None:
    tool = FarPython(median_s=0.001, sigma=1.0, longest_s=0.01)
    assert tool.schema == PythonTool(sandbox=object()).schema  # the same prompt, token for token
    done = await tool.execute(None, {"code": "print(round(10/3,4))"})
    assert done.text == "3.3333"
    assert 0 < done.metrics["tool_wait_s"] <= 0.01
    for code in ("import os", "print(round(1/0,4))", "print(round(__import__('os'),4))"):
        assert (await tool.execute(None, {"code": code})).is_error


@pytest.mark.torch
def test_the_uncorrected_side_takes_every_token_as_it_is() -> None:
    torch = pytest.importorskip("torch")
    from benchmarks.support.uncorrected import PATH
    from penstock.trainer.corrections import CORRECTIONS, CorrectionInput

    given = CorrectionInput(torch.tensor([-1.0, -2.0]), torch.tensor([-9.0, -0.1]), torch.tensor([0, 0]))
    corrected = CORRECTIONS.bind(PATH, {})(given)
    assert corrected.weights.tolist() == [1.0, 1.0]
    assert corrected.kept.all()


async def test_what_is_kept_is_not_run_again(measure: Measure, tmp_path: Path) -> None:
    common = Common(engine="hf", steps=8, groups=2, group_size=2, tool_median_s=0.02, tool_sigma=1.0, timeout_s=3600.0)
    for run, pace in ((LearningRun(0, IS, 0), 10.0), (LearningRun(2, IS, 0), 4.0)):
        file = tmp_path / common.digest() / run.name / "curve.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(asdict(curve(pace, LEARNS))))
    told = {**SMALL, "PENSTOCK_BENCH_STEPS": "8", "PENSTOCK_BENCH_FOLDER": str(tmp_path)}
    measured = await measure("learning", **told, PENSTOCK_BENCH_STALENESS="0,2,4", PENSTOCK_BENCH_MAX_RUNS="0")
    assert measured["ratio"]["async_over_sync_wall_to_0.9"] == 0.4
    assert measured["ratio"]["async_over_sync_steps_per_s"] == 2.5
    assert measured["ratio"]["corrected4_over_sync_reward"] is None
    assert measured["setup"]["runs"] == 3 * 2 * 3
    assert len(measured["setup"]["missing"]) == 18 - 2
    assert measured["setup"]["missing"][0] == "s4-truncated_is-seed0"


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.redis
@pytest.mark.deep
async def test_a_run_of_each_kind_is_launched_and_kept(measure: Measure, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    common = Common(engine="hf", steps=2, groups=2, group_size=2, tool_median_s=0.02, tool_sigma=1.0, timeout_s=3600.0)
    folder, run = tmp_path / common.digest(), LearningRun(1, "none", 0)
    (folder / run.name).mkdir(parents=True)
    (folder / run.name / "metrics.jsonl").write_text('{"step": 0, "left by": "a run that was killed"}\n')
    told = {**SMALL, "PENSTOCK_BENCH_FOLDER": str(tmp_path), "PENSTOCK_BENCH_STALENESS": "1"}
    measured = await measure("learning", **told, PENSTOCK_BENCH_CORRECTIONS="none", PENSTOCK_BENCH_SEEDS="0")
    assert set(measured["ratio"].values()) == {None}
    assert measured["setup"]["missing"] == []
    cell = measured["figures"]["staleness_1"]["none"]
    assert cell["seeds"] == 1
    kept = finished(run, folder)
    assert kept is not None
    assert len(kept.wall_s) == 2
    assert 0 < kept.wall_s[0] < kept.wall_s[1] == pytest.approx(cell["wall_s"], abs=0.1)
    summary = json.loads((folder / run.name / "summary.json").read_text())
    assert summary["trained_twice"] == summary["lost"] == 0
    assert summary["staleness_max"] <= 1
