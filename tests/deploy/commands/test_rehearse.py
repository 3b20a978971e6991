"""`penstock rehearse`, as a person would use it on the shipped recipe."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from penstock.deploy import app, rehearse_recipe
from penstock.testing import EnvCheck

RECIPES = Path(__file__).parents[3] / "recipes"
RECIPE = str(RECIPES / "calculator.yaml")
RIGHT = """
def right(snapshot):
    if snapshot.turn:
        return snapshot.results[-1]
    return snapshot.call("python", code=f"print({snapshot.task.extra_info['expression']})")

def lazy(snapshot):
    return "0.5"

def absent(snapshot):
    return {}["nothing"]

def silent(snapshot):
    return None

def wrong(snapshot):
    return "0.5" if snapshot.turn else snapshot.call("python", code="raise KeyError('lost')")
"""
LEAVES = """
import asyncio, sys
from penstock.agent_loops import AgentLoopBase

async def leave():
    sys.exit("done")

class Leaves(AgentLoopBase):
    async def run(self, task):
        await asyncio.gather(leave())
"""
pytestmark = pytest.mark.bwrap


@pytest.fixture
def policies(tmp_path: Path) -> str:
    (tmp_path / "policies_for_rehearsal.py").write_text(RIGHT)
    return str(tmp_path / "policies_for_rehearsal.py")


def rehearse(*words: str) -> Result:
    return CliRunner().invoke(app, ["rehearse", RECIPE, *words])


def test_a_right_policy_is_what_was_expected(policies: str) -> None:
    result = rehearse("--policy", f"{policies}:right", "--rows", "6", "--expect", "0.9999999999999999", "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert (figures["episodes"], figures["failed"], figures["reward"]["lowest"]) == (6, 0, 1.0)
    assert (figures["num_turns"], figures["tool_calls"]) == (2.0, 1.0)
    assert figures["outcomes"] == {"completed": 6}


def test_answers_that_are_cut_are_counted_with_the_setting(policies: str) -> None:
    words = ("--policy", f"{policies}:right", "--rows", "2", "agent.max_new_tokens=9")
    figures = json.loads(rehearse(*words, "--json").stdout)
    assert figures["cut_answers"] >= 2
    (line,) = (line for line in rehearse(*words).stdout.splitlines() if line.startswith("cut answers"))
    assert re.search(r"in row 1 and 1 more: .* cut to 9; raise agent\.max_new_tokens", line), line
    assert "cut answers" not in rehearse("--policy", f"{policies}:right", "--rows", "2").stdout


def test_another_reward_is_figures_row_by_row(policies: str) -> None:
    result = rehearse("--policy", f"{policies}:lazy", "--rows", "2", "--split", "eval", "--expect", "1")
    assert result.exit_code == 1
    assert "unexpected reward 0 in row 1" in result.stdout
    assert "unexpected reward 0 in row 2" in result.stdout


def test_rehearse_shows_errors_and_expects_by_row(policies: str, tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "?"}], "data_source": "calculator",
             "reward_model": {"ground_truth": "7"}, "extra_info": {"full_reward": full, "instance_id": name}}
            for full, name in ((0, "none"), (1.0, "fix-sum"))]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = f"data.train={tmp_path / 'rows.jsonl'}"
    result = rehearse(given, "--policy", f"{policies}:wrong", "--expect", "full")
    assert "tool error in row 1 (none) and 1 more: " in result.stdout, result.output
    assert "KeyError" in result.stdout
    assert "row 1," not in result.stdout
    assert "unexpected reward 0 in row 2 (fix-sum), 1 was expected" in result.stdout


@pytest.mark.parametrize(
    ("policy", "cause"),
    [
        ("absent", r"KeyError: 'nothing' \(.*policies_for_rehearsal.py, line 11\)"),
        ("silent", "returned None, not a text"),
    ],
)
def test_one_cause_of_many_failures_is_one_line_with_the_users_line(policies: str, policy: str, cause: str) -> None:
    result = rehearse("--policy", f"{policies}:{policy}", "--rows", "6")
    assert result.exit_code == 1
    (line,) = [line for line in result.output.splitlines() if line.startswith("failed") or "infra_error" in line]
    assert re.fullmatch(f"failed in row 1 and 5 more: policy: {cause}", line)
    figures = json.loads(rehearse("--policy", f"{policies}:{policy}", "--rows", "1", "--json").stdout)
    assert [one["row"] for one in figures["failures"]] == [1]
    assert re.fullmatch(f"policy: {cause}", figures["failures"][0]["cause"])


def test_a_loop_whose_task_leaves_the_process_is_a_failed_row(policies: str, tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    result = rehearse(f"agent.loop={tmp_path / 'leaves.py'}:Leaves", "--policy", f"{policies}:right", "--rows", "2")
    assert re.search(r"in row 1 and 1 more: loop: SystemExit: done \(.*leaves.py, line 6\)", result.output), result


def test_an_episode_without_a_reward_is_shown(policies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one has that a loop ended as cancelled."""

    async def unrewarded(*words: Any) -> EnvCheck:
        found = await rehearse_recipe(*words)
        return replace(found, trajectories=[replace(one, reward=None) for one in found.trajectories])

    monkeypatch.setattr("penstock.deploy.rehearsal.rehearse_recipe", unrewarded)
    result = rehearse("--policy", f"{policies}:right", "--rows", "1", "--expect", "1")
    assert (result.exit_code, result.exception.__class__) == (1, SystemExit), result.output
    assert "unexpected reward none in row 1, 1 was expected" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--policy {}:lefft", "has no 'lefft'"),
        ("--policy {}:right --split test", "--split test: use --split train or eval"),
        ("--policy {}:right data.train=nowhere.parquet", "nowhere.parquet: no such file"),
        ("--policy {}:right --expect much", "--expect much: give a number, or full"),
    ],
)
def test_mistakes_are_one_line(policies: str, words: str, message: str) -> None:
    result = rehearse(*words.format(policies).split())
    assert (result.exit_code, "Traceback" in result.output) == (2, False)
    assert message in result.stderr
