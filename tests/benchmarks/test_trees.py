"""Forked and separate episodes: figures of runs that are kept, and a real run of each side."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.trees import Learned

Measure = Callable[..., Awaitable[dict[str, Any]]]


async def test_sides_are_compared_at_as_many_sampled_tokens(measure: Measure, tmp_path: Path) -> None:
    sides = {
        "grpo": Learned((0.2, 0.4, 0.6, 0.8), (100, 100, 100, 100), 0.8, 0.7, 0.9),
        "tree": Learned((0.3, 0.5, 0.9, 0.9), (50, 50, 50, 50), 0.9, 0.8, 1.0),
    }
    for side, run in sides.items():
        (tmp_path / f"sums-{side}-1").mkdir()
        (tmp_path / f"sums-{side}-1" / "learned.json").write_text(json.dumps(asdict(run)))
    settings = {"PENSTOCK_BENCH_FOLDER": str(tmp_path), "PENSTOCK_BENCH_MAX_RUNS": "0"}
    measured = await measure("trees", **settings)
    ratio = measured["ratio"]
    assert ratio["sums_tree_over_grpo_tokens"] == 0.5
    assert ratio["sums_tree_over_grpo_avg"] == 1.125
    assert ratio["sums_tree_over_grpo_reward"] == round(0.65 / 0.3, 4), (
        "200 tokens: four steps of one, two of the other"
    )
    assert ratio["rooms_tree_over_grpo_avg"] is None
    assert measured["figures"]["sums-tree-1"] == {
        "first": 0.5667,
        "last": 0.7667,
        "sampled_tokens": 200,
        "avg@8": [0.9, 0.8, 1.0],
    }
    assert len(measured["setup"]["missing"]) == 2 * 2 * 3 - 2


@pytest.mark.deep
@pytest.mark.torch
@pytest.mark.bwrap
@pytest.mark.redis
@pytest.mark.timeout(1800)
async def test_both_sides_are_trained_evaluated_and_kept(measure: Measure, tmp_path: Path) -> None:
    pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'penstock[math]'")
    settings = {"PENSTOCK_BENCH_FOLDER": str(tmp_path), "PENSTOCK_BENCH_TASKS": "sums", "PENSTOCK_BENCH_SEEDS": "0"}
    measured = await measure("trees", **settings, PENSTOCK_BENCH_STEPS="2")
    assert measured["setup"]["missing"] == []
    assert {name: sides["sampled_tokens"] > 0 for name, sides in measured["figures"].items()} == {
        "sums-grpo-0": True,
        "sums-tree-0": True,
    }
    assert all(low <= value <= high for value, low, high in (one["avg@8"] for one in measured["figures"].values()))
    again = await measure("trees", **settings, PENSTOCK_BENCH_MAX_RUNS="0")
    assert again["figures"] == measured["figures"]
