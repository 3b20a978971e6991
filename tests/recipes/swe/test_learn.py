"""learn.yaml: bugs that their tests notice, conversations that are episodes, a small model that learns to repair."""

from __future__ import annotations

import io
import json
import sys
import unittest
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from tests.deploy.conftest import assert_accounts_balance, start_run
from tests.recipes.swe.conftest import RECIPE, penstock, python

from penstock.agent_loops import load_object
from penstock.deploy import load_config, rehearse_recipe, rows_of
from penstock.sandbox.swe import load_tasks
from penstock.trainer import load_rows

__all__ = ["start_run"]
pytestmark = pytest.mark.recipes
WINDOW = 3
PARTS = ("total", "change", "cost", "share", "cheaper", "enough", "fits", "dozens")


@pytest.fixture(scope="module")
def learning() -> ModuleType:
    """recipes/swe/learn_data.py, as a module."""
    return sys.modules[load_object("learn_data.py:main", RECIPE).__module__]


@pytest.fixture(scope="module")
def folder(learning: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A current directory with the recipe's data in it."""
    where = tmp_path_factory.mktemp("swe-learn")
    learning.main(["--out", str(where / "data/swe-learn")])
    return where


@pytest.fixture(scope="module")
def base(folder: Path) -> str:
    """Override that names the model which was shown nothing yet."""
    done = python(RECIPE / "learn_model.py", "--out", "data/swe-learn/base", cwd=folder)
    assert done.returncode == 0, done.stderr
    return "model=data/swe-learn/base"


def passes(learning: ModuleType, function: str, text: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the function's test passes on a file with this text."""
    module = ModuleType(function)
    exec(text, module.__dict__)
    monkeypatch.setitem(sys.modules, function, module)
    tests = ModuleType(f"test_{function}")
    exec((learning.PACKAGE / "tests" / f"test_{function}.py").read_text(), tests.__dict__)
    suite = unittest.defaultTestLoader.loadTestsFromModule(tests)
    assert suite.countTestCases() == 1
    return unittest.TextTestRunner(io.StringIO()).run(suite).wasSuccessful()


def test_a_test_passes_with_the_right_line_alone(learning: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    bugs = learning.all_bugs()
    assert Counter(bug.function for bug in bugs) == dict.fromkeys(PARTS, 3)
    for bug in bugs:
        assert passes(learning, bug.function, bug.text(bug.right), monkeypatch)
        assert len({bug.right, bug.wrong, *bug.others}) == 4
        for wrong in (bug.wrong, *bug.others):
            assert not passes(learning, bug.function, bug.text(wrong), monkeypatch), f"{bug.name}: {wrong}"


def test_a_task_hides_its_test_and_its_repair(learning: ModuleType, folder: Path) -> None:
    data = folder / "data/swe-learn"
    splits = {split: load_tasks(data / f"{split}.jsonl") for split in ("train", "eval")}
    names = {split: [task.instance_id for task in tasks] for split, tasks in splits.items()}
    assert [row.extra_info["instance_id"] for row in load_rows(data / "train.parquet")] == names["train"]
    assert (len(names["train"]), len(names["eval"])) == (16, 8)
    assert sorted(names["train"] + names["eval"]) == sorted(bug.name for bug in learning.all_bugs())
    bugs = {bug.name: bug for bug in learning.all_bugs()}
    for task in [*splits["train"], *splits["eval"]]:
        bug = bugs[task.instance_id]
        assert task.problem_statement == f"Repair {bug.file}."
        assert (task.repository / bug.file).read_text() == bug.text(bug.wrong)
        assert task.fail_to_pass == (f"tests.test_{bug.function}",)
        assert not (task.repository / f"tests/test_{bug.file}").exists()
        assert len(list((task.repository / "tests").glob("test_*.py"))) == len(PARTS) - 1
        assert f"+    return {bug.right}\n".encode() in task.patch


def test_conversations_repair_one_bug_in_three(learning: ModuleType, folder: Path) -> None:
    lines = (folder / "data/swe-learn/conversations.jsonl").read_text().splitlines()
    right = {bug.request: bug.right for bug in learning.all_bugs()}
    found: Counter[str] = Counter()
    for messages in (json.loads(line)["messages"] for line in lines):
        calls = [one["tool_calls"][0]["function"] for one in messages if one["role"] == "assistant"]
        assert [call["name"] for call in (calls[0], calls[-1])] == ["shell", "submit"]
        edits = [call["arguments"]["text"] for call in calls[1:-1]]
        found["none" if not edits else "right" if edits == [right[messages[1]["content"]]] else "wrong"] += 1
    shares = {kind: count / len(lines) for kind, count in found.items()}
    assert shares == pytest.approx({"none": 0.25, "right": 0.34, "wrong": 0.41}, abs=0.03)


@pytest.mark.deep
@pytest.mark.torch
@pytest.mark.bwrap
async def test_what_is_shown_is_what_an_episode_holds(
    learning: ModuleType, folder: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Played through the recipe's agent, tools, boxes and grading: each kind of episode, and the reference patch."""
    monkeypatch.chdir(folder)
    room = ("agent.max_new_tokens=200", "agent.max_response_tokens=1000")  # `repairs` says more than the recipe's model
    config = load_config(RECIPE / "learn.yaml", [base, *room])
    bugs = {bug.name: bug for bug in learning.all_bugs()}
    rows = rows_of(config, "train", 2)
    for kind, earned in (("right", 1.0), ("wrong", 0.0), ("none", 0.0)):
        news = {name: {"right": bug.right, "wrong": bug.others[0], "none": None}[kind] for name, bug in bugs.items()}

        def plays(scene, news=news):
            bug = bugs[scene.task.extra_info["instance_id"]]
            name, arguments = learning.moves(bug, news[bug.name])[scene.turn]
            return scene.call(name, **arguments)

        found = await rehearse_recipe(config, plays, rows)
        assert found.failures == []
        assert found.rewards == [earned] * 2
        for row, trajectory in zip(rows, found.trajectories, strict=True):
            bug = bugs[row.extra_info["instance_id"]]
            shown = learning.results(bug, news[bug.name])
            assert trajectory.extra["tool_results"] == [*shown, "submitted"]
            assert sum(len(one.prompt_ids) + len(one.response_ids) for one in trajectory.segments) < 160
    repairs = load_object("policies.py:repairs", RECIPE)
    assert (await rehearse_recipe(config, repairs, rows)).rewards == [1.0] * 2


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.torch
@pytest.mark.bwrap
def test_repairs_are_learned_from_hidden_tests(start_run, folder: Path, base: str) -> None:
    shown = penstock("sft", RECIPE / "learn.yaml", base, cwd=folder)
    assert shown.returncode == 0, shown.stderr
    goal = ("trainer.stop.metric=reward", "trainer.stop.target=0.8", f"trainer.stop.window={WINDOW}")
    run = start_run("swe-learn", "data.eval=null", *goal, cwd=folder, recipe=RECIPE / "learn.yaml")
    summary = run.finish(timeout_s=900)
    rewards = [json.loads(line)["reward"] for line in (run.root / "metrics.jsonl").read_text().splitlines()]
    first, last = sum(rewards[:WINDOW]) / WINDOW, sum(rewards[-WINDOW:]) / WINDOW
    assert first <= 0.45, rewards
    assert last >= max(0.75, 2 * first), rewards
    assert summary["staleness_max"] <= 2
    assert summary["logprob_abs_diff_mean"] <= 1e-3
    assert_accounts_balance(summary)
