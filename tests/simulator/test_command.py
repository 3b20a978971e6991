"""`penstock simulate` as a person meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.deploy import app
from penstock.simulator import Simulation, of_file

SETUPS = Path(__file__).parents[2] / "simulator" / "setups"
SMALL = """
group_size: 2
groups_per_step: 2
max_staleness: one_step_off
work: {prompt_tokens: 0, response: {median: 10, sigma: 0}}
rollout: {token_s: 1.0}
trainer: {tokens_per_s: 4.0}
steps: 6
warmup: 2
"""


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return str(path)


def invoke(*arguments: str) -> tuple[int, str]:
    ended = CliRunner().invoke(app, ["simulate", *arguments])
    return ended.exit_code, ended.output


def test_a_file_gives_times_bubbles_and_advice(small: str) -> None:
    code, said = invoke(small)
    assert code == 0
    assert "step            10.00 s, of which the trainer trains 10.00 s" in said
    assert "advice          The trainer is the limit" in said


def test_a_setup_that_ships_goes_by_its_name_and_a_recipe_is_no_setup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("model: mine\n")
    Path("mine.py").write_text("MODEL = 'mine'\n")
    assert invoke("agentic-64.yaml", "steps=6", "warmup=2")[0] == 0
    for recipe in ("mine.yaml", "mine.py"):
        code, said = invoke(recipe)
        assert (code, len(said.splitlines())) == (2, 1), said
        assert f"{recipe} is a recipe" in said


def test_json_is_one_object_with_the_setup_and_the_figures(small: str) -> None:
    code, said = invoke(small, "trainer.tokens_per_s=8", "--json")
    found = json.loads(said)
    assert code == 0
    assert found["setup"]["trainer"]["tokens_per_s"] == 8
    # Rollout 10 s, training 5 s, two batches in the system: steps end at 15, 20, 30, 35, 45, 50.
    assert found["figures"]["step_s"] == pytest.approx((50 - 20) / 4)
    assert Simulation.model_validate(found["setup"]).max_staleness == 1


def test_a_sweep_is_a_table_with_one_line_per_value(small: str) -> None:
    code, said = invoke(small, "--sweep", "max_staleness=0,1")
    lines = [line.split() for line in said.splitlines()]
    assert code == 0
    assert lines[0][:2] == ["max_staleness", "step_s"]
    assert [line[:2] for line in lines[1:]] == [["0", "20.00"], ["1", "10.00"]]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["rollout.sevrers=2"], "unknown key sevrers; known are servers"),
        (["rolout.servers=2"], "unknown section rolout; known are work, rollout"),
        (["rollout.servers=0"], "rollout.servers: Input should be greater than or equal to 1"),
        (["rollout.servers"], "write it as key=value"),
        (["max_staleness=0.5"], "bounded takes a whole max_staleness"),
        (["colocated=true"], "set max_staleness: sync"),
        (["--sweep", "max_staleness"], "write it as key=a,b,c"),
    ],
)
def test_mistakes_name_the_key_and_the_mend(small: str, arguments: list[str], complaint: str) -> None:
    code, said = invoke(small, *arguments)
    assert code == 2
    assert complaint in said
    assert "Traceback" not in said


@pytest.mark.parametrize("path", sorted(SETUPS.glob("*.yaml")), ids=lambda path: path.name)
def test_setups_that_come_with_penstock_are_valid(path: Path) -> None:
    assert of_file(path).gpus > 1
