"""A curriculum finds the few rows that say anything, and trains on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.conftest import assert_accounts_balance
from tests.recipes.conftest import RECIPES, script, steps_of

from penstock.datasets import evaluate, parquet_rows

pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(1800),
    *(pytest.mark.recipes, pytest.mark.slow, pytest.mark.redis, pytest.mark.torch, pytest.mark.bwrap),
]
ROWS = 128
GUESSED = 4
"""Rows at most whose wrong answer is guessed: a small number that is 1 too high."""


def test_few_rows_with_a_signal_are_found(start_run: Any, tmp_path: Path) -> None:
    """Drawn alike, one group in eight has a signal to the end."""
    script("curriculum/data.py").main(["--out", str(tmp_path), "--train", str(ROWS)])
    files = (f"data.train={tmp_path / 'train.parquet'}", "data.eval=null")
    run = start_run("curriculum", *files, recipe=RECIPES / "curriculum/cpu.yaml")
    assert_accounts_balance(run.finish(timeout_s=900))
    lines = steps_of(run)
    assert signal(lines[:12]) < 0.25 < signal(lines[-12:])
    pools = {pool: rows_in(lines[-1], pool) for pool in ("new", "learnable", "easy", "hard")}
    assert sum(pools.values()) == ROWS
    solvable, shares = solvable_rows(tmp_path / "train.parquet"), pass_shares(run.root / "curriculum.jsonl")
    assert len(solvable) == 16
    assert sum(shares[row][-1] > 0 for row in solvable) >= 14
    never_passed = [row for row in range(ROWS) if not any(shares[row])]
    assert pools["hard"] >= max(len(never_passed), ROWS - len(solvable) - GUESSED)
    assert lines[-1]["reward"] > lines[0]["reward"]


def solvable_rows(path: Path) -> set[int]:
    """Numbers of the rows where a right answer earns something."""
    score = script("calculator/reward.py").compute_score
    rows = [(row["extra_info"]["expression"], row["reward_model"]["ground_truth"]) for row in parquet_rows(path)]
    return {number for number, (text, truth) in enumerate(rows) if score("", repr(evaluate(text)), truth)}


def pass_shares(path: Path) -> dict[int, list[float]]:
    """By row: share of episodes that passed in each of its trained groups, oldest first. A task's name ends with its
    row."""
    found: dict[int, list[float]] = {}
    for line in path.read_text().splitlines():
        for task, share in json.loads(line)["passed"].items():
            found.setdefault(int(task.rpartition("/")[2]), []).append(share)
    return found


def signal(lines: list[dict[str, Any]]) -> float:
    """Share of groups whose episodes did not all earn the same."""
    return 1 - sum(line["zero_variance_groups"] for line in lines) / sum(line["groups"] for line in lines)


def rows_in(line: dict[str, Any], pool: str) -> int:
    return int(sum(value for name, value in line.items() if name.startswith("curriculum/") and name.endswith(pool)))
