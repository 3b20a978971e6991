"""A curriculum finds the few rows that say anything, and trains on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.conftest import assert_accounts_balance
from tests.recipes.conftest import RECIPES, script

from penstock.datasets import evaluate, parquet_rows

pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(1800),
    *(pytest.mark.recipes, pytest.mark.slow, pytest.mark.redis, pytest.mark.torch, pytest.mark.bwrap),
]
ROWS = 128
GUESSED = 4
"""Rows whose wrong answer was found by chance in their newest groups: 1 above a small number is soon said."""


def test_few_rows_with_a_signal_are_found(start_run: Any, tmp_path: Path) -> None:
    """Drawn alike, one group in eight has a signal to the end."""
    script("curriculum/data.py").main(["--out", str(tmp_path), "--train", str(ROWS)])
    files = (f"data.train={tmp_path / 'train.parquet'}", "data.eval=null")
    run = start_run("curriculum", *files, recipe=RECIPES / "curriculum/cpu.yaml")
    assert_accounts_balance(run.finish(timeout_s=900))
    lines = [json.loads(line) for line in (run.root / "metrics.jsonl").read_text().splitlines()]
    assert signal(lines[:12]) < 0.25 < signal(lines[-12:])
    pools = {pool: rows_in(lines[-1], pool) for pool in ("new", "learnable", "easy", "hard")}
    assert sum(pools.values()) == ROWS
    solvable, passed = solvable_rows(tmp_path / "train.parquet"), newest_pass_rates(run.root / "curriculum.jsonl")
    assert len(solvable) == 16
    assert sum(passed[row] > 0 for row in solvable) >= 14
    assert pools["hard"] >= ROWS - len(solvable) - GUESSED
    assert lines[-1]["reward"] > lines[0]["reward"]


def solvable_rows(path: Path) -> set[int]:
    """Numbers of the rows where a right answer earns something."""
    score = script("calculator/reward.py").compute_score
    rows = [(row["extra_info"]["expression"], row["reward_model"]["ground_truth"]) for row in parquet_rows(path)]
    return {number for number, (text, truth) in enumerate(rows) if score("", repr(evaluate(text)), truth)}


def newest_pass_rates(path: Path) -> dict[int, float]:
    """Share that passed of each row's newest trained group; a task's name ends with its row."""
    steps = [json.loads(line)["passed"] for line in path.read_text().splitlines()]
    return {int(task.rpartition("/")[2]): share for step in steps for task, share in step.items()}


def signal(lines: list[dict[str, Any]]) -> float:
    """Share of groups whose episodes did not all earn the same."""
    return 1 - sum(line["zero_variance_groups"] for line in lines) / sum(line["groups"] for line in lines)


def rows_in(line: dict[str, Any], pool: str) -> int:
    return int(sum(value for name, value in line.items() if name.startswith("curriculum/") and name.endswith(pool)))
