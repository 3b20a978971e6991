"""learn.yaml: bugs that check and tests notice, conversations that are episodes, a small model that learns to go on."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import unittest
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from tests.deploy.conftest import start_run
from tests.recipes.conftest import assert_learned
from tests.recipes.swe.conftest import RECIPE, penstock, python

from penstock.agent_loops import load_object
from penstock.deploy import load_config, rehearse_recipe, rows_of
from penstock.sandbox.swe import load_tasks
from penstock.trainer import load_rows

__all__ = ["start_run"]
pytestmark = pytest.mark.recipes
WINDOW = 3
PARTS = ("change", "cheaper", "cost", "dozens", "enough", "fits", "share", "total")


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


def hidden_failures(learning: ModuleType, function: str, text: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hidden tests that fail where `function` has this text and all others are right."""
    for name in PARTS:
        module = ModuleType(name)
        exec(text if name == function else learning.right_text(f"{name}.py"), module.__dict__)
        monkeypatch.setitem(sys.modules, name, module)
    tests = ModuleType("test_package")
    exec(learning.right_text(learning.HIDDEN), tests.__dict__)
    suite = unittest.defaultTestLoader.loadTestsFromModule(tests)
    assert suite.countTestCases() == len(PARTS)
    found = unittest.TextTestRunner(io.StringIO()).run(suite)
    assert not found.errors
    return [case.id().rpartition(".")[2] for case, _ in found.failures]


def test_check_and_tests_notice_each_wrong_line(learning: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuple(learning.check.EXAMPLES) == PARTS
    for function in PARTS:
        bugs = learning.bugs_of(function)
        assert len({bugs[0].right, *(bug.wrong for bug in bugs)}) == 4
        assert hidden_failures(learning, function, bugs[0].text(bugs[0].right), monkeypatch) == []
        for bug in bugs:
            failed = hidden_failures(learning, function, bug.text(bug.wrong), monkeypatch)
            assert failed == [f"test_{function}"], bug.wrong
            assert learning.complaint(bug).startswith(f"{function}("), bug.wrong


def test_a_task_hides_its_tests_and_its_repair(learning: ModuleType, folder: Path) -> None:
    data = folder / "data/swe-learn"
    splits = {split: load_tasks(data / f"{split}.jsonl") for split in ("train", "eval")}
    names = {split: [task.instance_id for task in tasks] for split, tasks in splits.items()}
    assert [row.extra_info["instance_id"] for row in load_rows(data / "train.parquet")] == names["train"]
    assert (len(names["train"]), len(names["eval"])) == (32, 16)
    assert len({*names["train"], *names["eval"]}) == 48
    for task in [*splits["train"], *splits["eval"]]:
        assert task.repository is not None
        files = {path.name: path.read_text() for path in task.repository.iterdir()}
        assert sorted(files) == sorted(["check.py", *(f"{name}.py" for name in PARTS)])
        wrong = [name for name in PARTS if files[f"{name}.py"] != learning.right_text(f"{name}.py")]
        assert wrong == [part.partition("-")[0] for part in task.instance_id.split("_")]
        for name in wrong:
            assert f"+{learning.right_text(f'{name}.py').splitlines()[1]}\n".encode() in task.patch
        assert task.fail_to_pass == (learning.HIDDEN_ID,)


def test_check_says_what_the_request_says(folder: Path) -> None:
    task = load_tasks(folder / "data/swe-learn/train.jsonl")[0]
    command = [sys.executable, "-B", "check.py"]
    done = subprocess.run(command, cwd=task.repository, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert task.problem_statement == f"Make check.py pass. It says: {done.stderr.strip()}"


def test_conversations_stop_behind_a_share_of_checks(learning: ModuleType, folder: Path) -> None:
    lines = (folder / "data/swe-learn/conversations.jsonl").read_text().splitlines()
    after: Counter[str] = Counter()
    for messages in (json.loads(line)["messages"] for line in lines):
        calls = [one["tool_calls"][0]["function"] for one in messages if one["role"] == "assistant"]
        assert [call["name"] for call in calls] == ["shell", "editor", "shell"] * (len(calls) // 3) + ["submit"]
        checks = [one["content"] for one in messages if one["role"] == "tool"][2::3]
        assert len(checks) in (1, 2, 3)
        assert learning.PASSES not in checks[:-1]
        after["went on"] += len(checks) - 1
        after["stopped"] += checks[-1] != learning.PASSES
    assert after["stopped"] / after.total() == pytest.approx(learning.STOPS, abs=0.03)


@pytest.mark.deep
@pytest.mark.torch
@pytest.mark.bwrap
async def test_what_is_shown_is_what_an_episode_holds(
    learning: ModuleType, folder: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Played through the recipe's agent, tools, boxes and grading: each kind of episode, and the reference patch."""
    monkeypatch.chdir(folder)
    config = load_config(RECIPE / "learn.yaml", [base])
    of_size = {row.extra_info["instance_id"].count("-"): row for row in rows_of(config, "train")}
    assert set(of_size) == set(learning.BUGS)
    rows = list(of_size.values())
    packages = {row.extra_info["instance_id"]: package_of(learning, row.extra_info["instance_id"]) for row in rows}
    for left_broken, earned in ((0, 1.0), (1, 0.0)):
        repaired = {name: len(broken.bugs) - left_broken for name, broken in packages.items()}

        def plays(state, repaired=repaired):
            name = state.task.extra_info["instance_id"]
            tool, arguments = learning.moves(packages[name], repaired[name])[state.turn]
            return state.call(tool, **arguments)

        found = await rehearse_recipe(config, plays, rows)
        assert found.failures == []
        assert found.rewards == [earned] * 2
        for row, trajectory in zip(rows, found.trajectories, strict=True):
            name = row.extra_info["instance_id"]
            shown = learning.results(packages[name], repaired[name])
            assert trajectory.extra["tool_results"] == [*shown, "submitted"]
            assert sum(len(one.prompt_ids) + len(one.response_ids) for one in trajectory.segments) < 340
    room = ("agent.max_new_tokens=200", "agent.max_response_tokens=1000")  # `oracle` says more than the recipe's model
    repairs = load_object("policies.py:oracle", RECIPE)
    played = await rehearse_recipe(load_config(RECIPE / "learn.yaml", [base, *room]), repairs, rows)
    assert played.rewards == [1.0] * 2


def package_of(learning: ModuleType, instance_id: str):
    """The package that has this name."""
    parts = [part.partition("-") for part in instance_id.split("_")]
    return learning.BrokenPackage(tuple(learning.bugs_of(name)[int(number)] for name, _, number in parts))


@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.torch
@pytest.mark.bwrap
def test_a_small_model_learns_to_repair_until_it_passes(start_run, folder: Path, base: str) -> None:
    shown = penstock("sft", RECIPE / "learn.yaml", base, cwd=folder)
    assert shown.returncode == 0, shown.stderr
    goal = ("trainer.stop.metric=reward", "trainer.stop.target=0.8", f"trainer.stop.window={WINDOW}")
    run = start_run("swe-learn", "data.eval=null", *goal, cwd=folder, recipe=RECIPE / "learn.yaml")
    assert_learned(run, window=WINDOW, first_most=0.45, last_least=0.75, growth=2.0)
