"""More is learned from few rows with a curriculum than without one, in as many steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.conftest import assert_accounts_balance
from tests.recipes.conftest import RECIPES, script

pytestmark = [
    pytest.mark.deep,
    *(pytest.mark.recipes, pytest.mark.slow, pytest.mark.redis, pytest.mark.torch, pytest.mark.bwrap),
]
STEPS = 24


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("curriculum")
    script("curriculum/data.py").main(["--out", str(folder)])
    return folder


def evaluated(start_run: Any, data: Path, name: str, *settings: str) -> tuple[float, list[dict[str, Any]]]:
    """(reward of the evaluation after the last step, lines of metrics.jsonl)"""
    files = (f"data.train={data / 'train.parquet'}", f"data.eval={data / 'eval.parquet'}")
    recipe = RECIPES / "curriculum/cpu.yaml"
    run = start_run(name, *files, f"trainer.steps={STEPS}", *settings, recipe=recipe)
    assert_accounts_balance(run.finish(timeout_s=900))
    lines = [json.loads(line) for line in (run.root / "metrics.jsonl").read_text().splitlines()]
    evaluation = json.loads((run.root / "eval.jsonl").read_text().splitlines()[-1])
    return evaluation["reward"], lines


def test_a_curriculum_learns_more_from_rows_that_mostly_say_nothing(start_run: Any, data: Path) -> None:
    alike, plain = evaluated(start_run, data, "alike", "data.curriculum=null")
    drawn, lines = evaluated(start_run, data, "drawn")
    assert drawn > alike + 0.05
    assert not any(name.startswith("curriculum/") for name in plain[-1])
    hard = [sum(value for name, value in line.items() if name.endswith("/hard")) for line in lines]
    assert hard[0] < hard[-1] <= 128
    late, early = signal(lines[-8:]), signal(lines[:8])
    assert late > early


def signal(lines: list[dict[str, Any]]) -> float:
    """Share of groups whose episodes did not all earn the same."""
    return 1 - sum(line["zero_variance_groups"] for line in lines) / sum(line["groups"] for line in lines)
