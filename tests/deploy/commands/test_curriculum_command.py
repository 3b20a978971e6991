"""`penstock curriculum`: shows a run's curriculum, and changes its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from penstock.deploy import app
from penstock.trainer import WEIGHTS_FILE, read_weights

ROW = {
    "step": 3,
    "reward": 0.5,
    **{f"curriculum/openai/gsm8k/{name}": value for name, value in {"weight": 1.0, "drawn": 12, "new": 4}.items()},
    **{f"curriculum/sums/{name}": value for name, value in {"weight": 1.0, "drawn": 9, "pass_rate": 0.25}.items()},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return run_folder(tmp_path / "mine", curriculum={"hard": 0.2})


def run_folder(root: Path, curriculum: dict[str, Any] | None) -> Path:
    root.mkdir()
    tree = {"name": "mine", "model": "m", "data": {"train": "t.jsonl", "curriculum": curriculum}}
    (root / "config.yaml").write_text(yaml.safe_dump(tree))
    (root / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    return root


def ask(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["curriculum", str(folder), *words])


def test_it_shows_the_newest_step_by_source(folder: Path) -> None:
    state = json.loads(ask(folder, "--json").stdout)
    assert state["weights"]["hard"] == 0.2
    assert state["sources"] == {
        "openai/gsm8k": {"weight": 1.0, "drawn": 12, "new": 4},
        "sums": {"weight": 1.0, "drawn": 9, "pass_rate": 0.25},
    }
    text = ask(folder).stdout
    assert [line.split()[0] for line in text.splitlines()[1:3]] == ["openai/gsm8k", "sums"]
    assert not (folder / WEIGHTS_FILE).exists()


def test_given_weights_are_added_to_those_before(folder: Path) -> None:
    assert ask(folder, "--source", "openai/gsm8k=3", "--pool", "easy=0").exit_code == 0
    assert json.loads(ask(folder, "--source", "sums=0", "--json").stdout)["sources"]["sums"]["weight"] == 0.0
    weights = read_weights(folder / WEIGHTS_FILE)
    assert (weights.sources, weights.easy, weights.hard) == ({"openai/gsm8k": 3.0, "sums": 0.0}, 0.0, 0.2)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--pool", "middling=1"], "new, learnable, easy, hard"),
        (["--source", "sum=1"], "sources has sum, the data has openai/gsm8k, sums"),
        (["--source", "sums"], "write NAME=WEIGHT"),
        (["--source", "sums=-1"], "sums"),
    ],
)
def test_what_cannot_be_is_named_and_changes_nothing(folder: Path, words: list[str], named: str) -> None:
    result = ask(folder, *words)
    assert result.exit_code == 2
    assert named in result.stderr
    assert not (folder / WEIGHTS_FILE).exists()


def test_a_run_without_a_curriculum_is_named(tmp_path: Path) -> None:
    result = ask(run_folder(tmp_path / "plain", curriculum=None))
    assert (result.exit_code, "set data.curriculum" in result.stderr) == (2, True)
    assert "no such run" in ask(tmp_path / "nothing").stderr
