"""`reasoning_gym:TASK` as a source of rows."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.agent_loops.environments.conftest import HUBS, hub

from penstock.datasets import BadSpec, check_spec, is_generated, materialise
from penstock.trainer import load_rows

PATH = HUBS / "reasoning_gym"


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("reasoning_gym:", "names of reasoning-gym"),
        ("reasoning_gym:chain_sum?size=0", "size"),
        ("reasoning_gym:chain_sum?size=many", "size"),
        ("reasoning_gym:chain_sum?seed=-1", "seed"),
        ("reasoning_gym:chain sum", "names of reasoning-gym"),
    ],
)
def test_a_bad_source_is_named(spec: str, named: str) -> None:
    assert is_generated(spec)
    with pytest.raises(BadSpec, match=named):
        check_spec(spec)


def test_without_the_package_it_is_said_how_to_have_it(tmp_path: Path) -> None:
    (tmp_path / "reasoning_gym.py").write_text("raise ModuleNotFoundError(\"No module named 'reasoning_gym'\")")
    with pytest.raises(BadSpec, match="pip install reasoning-gym"):
        materialise(f"reasoning_gym:chain_sum?size=2&path={tmp_path}", tmp_path)


@pytest.mark.hubs
@pytest.mark.deep
@hub("reasoning_gym", "reasoning_gym")
def test_rows_hold_what_makes_the_problem_again(tmp_path: Path) -> None:
    spec = f"reasoning_gym:chain_sum,leg_counting?size=3&seed=4&system=direct&path={PATH}"
    path = materialise(spec, tmp_path)
    assert pq.read_table(path).num_rows == 6
    rows = load_rows(path)
    assert [row.extra_info["task"] for row in rows[:2]] == ["chain_sum", "leg_counting"]
    assert [row.extra_info["number"] for row in rows] == [0, 0, 1, 1, 2, 2]
    assert json.loads(rows[0].extra_info["config"]) == {"size": 3, "seed": 4}
    assert [message["role"] for message in rows[0].messages] == ["system", "user"]
    assert rows[0].data_source == "reasoning_gym/chain_sum"
    assert materialise(spec, tmp_path) == path
    assert materialise(spec.replace("seed=4", "seed=5"), tmp_path) != path


@pytest.mark.hubs
@pytest.mark.deep
@hub("reasoning_gym", "reasoning_gym")
@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("no_such_task?size=1", "no_such_task"),
        ("chain_sum?size=1&colour=3", "colour"),
        ("chain_sum?size=1&system=other", "other"),
    ],
)
def test_what_the_package_does_not_have_is_named(tmp_path: Path, spec: str, named: str) -> None:
    with pytest.raises(BadSpec, match=named):
        materialise(f"reasoning_gym:{spec}&path={PATH}", tmp_path)
