from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.sandbox.swe import Grade, SweTask, SweTaskError, TaskCheck, load_tasks
from penstock.sandbox.swe.report import read_lines
from penstock.sandbox.swe.task import PROTECTED, PytestCommand, is_protected

ROW = {"instance_id": "a__b-1", "repository": "repo", "base_commit": "abc", "FAIL_TO_PASS": '["t.py::x"]'}


def test_task_rows_are_swe_benchs(tmp_path):
    row = {**ROW, "PASS_TO_PASS": ["t.py::y"], "patch": "ä", "hints_text": "", "version": "1.0", "test_patch": None}
    (tmp_path / "tasks.jsonl").write_text(f"{json.dumps(row)}\n\n{json.dumps({**row, 'repository': '/elsewhere'})}\n")
    first, second = load_tasks(tmp_path / "tasks.jsonl")
    assert (first.repository, second.repository) == (tmp_path / "repo", Path("/elsewhere"))
    assert (first.tests, first.patch, first.test_patch) == (("t.py::x", "t.py::y"), "ä".encode(), b"")
    assert (first.protected, first.sandbox_image) == (PROTECTED, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instance_id": ""}, "no instance_id"),
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS is empty"),
        ({"FAIL_TO_PASS": "t.py::x"}, "FAIL_TO_PASS must be a list"),
        ({"PASS_TO_PASS": [1]}, "PASS_TO_PASS must be a list"),
        ({"repository": None}, "it needs a repository"),
        ({"test_command": "python3 -S -m pytest"}, "test_command"),
    ],
)
def test_task_bad_row_is_named_with_its_line(tmp_path, change, message):
    (tmp_path / "tasks.jsonl").write_text(f"{json.dumps({**ROW, **change})}\n")
    with pytest.raises(SweTaskError, match=rf"tasks\.jsonl:1: .*{message}"):
        load_tasks(tmp_path / "tasks.jsonl")
    with pytest.raises(SweTaskError):
        SweTask.from_row({**ROW, **change})


def test_task_pytest_commands_are_taken_apart():
    parse = PytestCommand.parse
    assert parse("python3 -m pytest") == PytestCommand("python3", (), {}, ())
    assert parse("A=1 PYTHONPATH=src:lib:$PYTHONPATH /env/bin/python -m pytest -k 'a b'") == PytestCommand(
        "/env/bin/python", ("-k", "a b"), {"A": "1"}, ("src", "lib")
    )
    assert parse("pytest -q") == PytestCommand("python3", ("-q",), {}, ())
    assert parse("go test -run {test}") is None
    assert parse("python3 -m unittest {test}") is None


@pytest.mark.parametrize(
    ("path", "protected"),
    [
        *((path, True) for path in ("t/x.py", "t", "t/x.py/sub", "a/conftest.py", "tests/data/a", "a/tests/b.py")),
        *((path, True) for path in ("test/a.py", "setup.cfg", "sub/pyproject.toml", "w.egg-info/PKG-INFO", "a/b.pyc")),
        *((path, False) for path in ("t2", "src/test/a.py", "src/_pytest/python.py", "testing.py", "a/pytest.py")),
    ],
)
def test_task_what_a_patch_may_not_change(path, protected):
    assert is_protected(path, ["t/x.py"], PROTECTED) is protected


def test_task_only_signed_lines_in_order_count():
    from penstock.sandbox.swe.in_box.run_pytest import signer

    key = b"k" * 32
    lines = written(
        signer, key, [("canaries", ["c"]), ("c", "failed"), ("a", "passed"), ("b", "passed"), ("b", "failed")]
    )
    seen = read_lines(b"\n".join(lines), key)
    assert (seen.outcomes, seen.doubt()) == (
        {"c": "failed", "a": "passed", "b": "failed"},
        "the run ended before its last test",
    )
    assert read_lines(b"\n".join(lines), b"x" * 32).canaries is None
    assert read_lines(b"\n".join([lines[0], lines[2]]), key).outcomes == {}
    forged = lines[2].replace(b'"a"', b'"z"')
    assert "z" not in read_lines(b"\n".join([*lines[:2], forged]), key).outcomes
    assert read_lines(b"\xff\n\n 1\nno line", key).doubt() == "the run ended before its first test"


def written(signer, key, records):
    import os
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        sign = signer(key, os.path.join(folder, "results"))
        for name, value in records:
            plain = {"kind": "canaries", "tests": value} if name == "canaries" else {"kind": "test", "test": name}
            sign(plain if name == "canaries" else {**plain, "outcome": value, "seconds": 0.0})
        with open(os.path.join(folder, "results"), "rb") as file:
            return file.read().splitlines()


def test_task_check_names_what_is_wrong():
    task = SweTask.from_row({**ROW, "PASS_TO_PASS": ["k"]})

    def graded(fixed: str, kept: str = "passed", reason: str = "") -> Grade:
        return Grade("a", {"t.py::x": fixed, "k": kept}, task.fail_to_pass, task.pass_to_pass, reason)

    sound = TaskCheck(task, (graded("passed"),), (graded("failed"),))
    assert sound.problems == ()
    flaky = TaskCheck(task, (graded("passed"), graded("failed")), (graded("failed"),) * 2)
    assert flaky.flaky == ("t.py::x",)
    assert flaky.problems == ("the reference patch does not pass: t.py::x failed", "flaky: t.py::x")
    easy = TaskCheck(task, (graded("passed"),), (graded("passed"),))
    assert easy.problems == ("without a patch some of FAIL_TO_PASS passes",)
    broken = TaskCheck(task, (graded("passed"),), (graded("failed", "failed"),))
    assert broken.problems == ("without a patch these of PASS_TO_PASS fail: k",)
