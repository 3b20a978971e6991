"""With its teacher the tiny student learns faster than by GRPO alone, and comes to earn what the teacher earns: from
sampled tokens, and from the teacher's likeliest ids."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.deploy.conftest import assert_accounts_balance
from tests.recipes.conftest import RECIPES

from benchmarks.support import distill_comparison

pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(1800),
    *(pytest.mark.recipes, pytest.mark.slow, pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch),
]


def test_faster_than_grpo_alone(tmp_path: Path) -> None:
    model = tmp_path / "teacher"
    command = [sys.executable, "-m", "penstock.deploy.cli", "sft", str(RECIPES / "distill/cpu.yaml")]
    subprocess.run([*command, f"sft.out={model}", f"runs_dir={tmp_path / 'sft'}"], check=True, timeout=900)
    cells = ["GRPO alone", "teacher and GRPO", "top 8 and GRPO"]
    comparison = distill_comparison.main(
        ["--teacher", str(model), "--out", str(tmp_path / "runs"), "--seeds", "0", "--cells", *cells]
    )
    assert comparison["steps"]["teacher and GRPO"][0] is not None
    assert comparison["steps"]["top 8 and GRPO"][0] is not None
    # The whole curve: the step at which three rewards first average 0.9 differs by several from run to run.
    curves = [comparison["rewards"][cell][0] for cell in cells]
    shortest = min(map(len, curves))
    alone, taught, by_top = (sum(curve[:shortest]) / shortest for curve in curves)
    assert taught > alone
    assert by_top > alone
    lines = (tmp_path / "runs" / "top-8-and-grpo-0" / "metrics.jsonl").read_text().splitlines()
    first, last = (json.loads(lines[at]) for at in (0, -1))
    assert 0 <= last["teacher_divergence"] < first["teacher_divergence"]
    assert first["teacher_top_mass"] > 0.9
    assert (tmp_path / "runs" / "comparison.png").stat().st_size > 0
    summary = json.loads((tmp_path / "runs" / "teacher-and-grpo-0" / "summary.json").read_text())
    assert_accounts_balance(summary)
