"""Broken packages as tasks: proven, repeatable, without a trace of how they were made."""

from __future__ import annotations

import json
import subprocess

import pytest
from tests.recipes.swe.conftest import PER_PACKAGE, RECIPE, penstock

from penstock.sandbox.swe import load_tasks, snapshot_of
from penstock.trainer import load_rows

pytestmark = [pytest.mark.deep, pytest.mark.recipes, pytest.mark.bwrap]


@pytest.fixture(scope="session")
def fields(data) -> list[dict]:
    return [json.loads(line) for line in (data.folder / "data/swe/train.jsonl").read_text().splitlines()]


def test_so_many_tasks_of_each_package_with_their_licences(data, fields):
    assert (
        sorted(one["repo"].split()[0] for one in fields) == ["mdurl"] * PER_PACKAGE + ["sortedcontainers"] * PER_PACKAGE
    )
    assert "mdurl 0.1" in data.said
    assert "(MIT License)" in data.said
    assert len({one["instance_id"] for one in fields}) == 2 * PER_PACKAGE
    for one in fields:
        assert one["FAIL_TO_PASS"]
        assert one["PASS_TO_PASS"]
        assert one["licence"]


def test_rows_are_what_a_run_reads(data, fields):
    rows = load_rows(data.tasks)
    assert [row.extra_info["instance_id"] for row in rows] == [one["instance_id"] for one in fields]
    for row, one in zip(rows, fields, strict=True):
        assert row.messages[0]["content"].endswith(one["problem_statement"])
        assert row.data_source == "swe"


def test_the_words_of_a_task_tell_what_fails_and_not_where(fields):
    for one in fields:
        changed = [line[6:] for line in one["patch"].splitlines() if line.startswith("+++ b/")]
        named = [test.partition("::")[2] for test in one["FAIL_TO_PASS"]]
        assert any(name in one["problem_statement"] for name in named)
        assert not any(path in one["problem_statement"] for path in changed)
        assert one["mutation"] not in one["problem_statement"]


def test_neither_the_fix_nor_the_hidden_tests_are_in_what_a_box_gets(data, fields):
    for task, one in zip(load_tasks(data.folder / "data/swe/train.jsonl"), fields, strict=True):
        given = _files(snapshot_of(task.repository, task.base_commit))
        right = [line[1:] for line in one["patch"].splitlines() if line[:1] == "+" and line[:3] != "+++"]
        wrong = [line[1:] for line in one["patch"].splitlines() if line[:1] == "-" and line[:3] != "---"]
        (path,) = {line[6:] for line in one["patch"].splitlines() if line.startswith("--- a/")}
        for line in wrong:
            assert line in given[path].splitlines()
        assert "".join(wrong) != "".join(right)
        for test in one["FAIL_TO_PASS"]:
            file, _, name = test.partition("[")[0].partition("::")
            assert f"def {name.rpartition('::')[2]}(" not in given.get(file, "")


def _files(packed: bytes) -> dict[str, str]:
    import io
    import tarfile

    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        members = [member for member in archive.getmembers() if member.isfile()]
        return {member.name: archive.extractfile(member).read().decode() for member in members}


def test_the_repositories_hold_one_commit_per_task_and_nothing_else(data, fields):
    for name in ("mdurl", "sortedcontainers"):
        folder = data.folder / f"data/swe/repositories/{name}.git"
        argv = ["git", "--git-dir", folder, "rev-list", "--all"]
        commits = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
        assert sorted(commits) == sorted(one["base_commit"] for one in fields if one["instance_id"].startswith(name))
        argv = ["git", "--git-dir", folder, "fsck", "--unreachable", "--no-progress"]
        assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == ""


def test_the_same_seed_makes_the_same_tasks_however_many_boxes_there_are(data, fields, tmp_path):
    options = ("--package", "mdurl", "--tests", RECIPE / "package_tests/mdurl", "--seed", 7)
    done = penstock("data", "swe-mutations", *options, "--count", 1, "--concurrency", 1, "--out", "other", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (again,) = [json.loads(line) for line in (tmp_path / "other/train.jsonl").read_text().splitlines()]
    assert again in fields


def test_the_check_finds_them_sound_and_a_broken_one_not(data, fields, tmp_path):
    folder = data.folder / "data/swe"
    broken = {**fields[0], "patch": fields[1]["patch"]}
    (folder / "broken.jsonl").write_text(json.dumps(broken) + "\n")
    done = penstock("data", "swe-check", "--tasks", folder / "broken.jsonl", cwd=tmp_path)
    assert done.returncode == 1
    assert f"{broken['instance_id']}: the reference patch does not pass" in done.stderr
    done = penstock("data", "swe-check", "--tasks", folder / "train.jsonl", "--limit", 1, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert "1 of 1: " in done.stderr
    done = penstock("data", "swe-check", "--tasks", folder / "none.jsonl", cwd=tmp_path)
    assert (done.returncode, done.stderr.strip()) == (2, f"--tasks {folder / 'none.jsonl'}: no such file")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--package", "mdurl"), "give a folder of them with --tests"),
        (("--package", "no_such_thing"), "neither a folder nor an installed package"),
        (("--package", "mdurl", "--tests", RECIPE / "package_tests/mdurl", "--backend", "chroot"), "backend"),
        (
            ("--package", "mdurl", "--tests", RECIPE / "package_tests/sortedcontainers"),
            "pytest finds no tests in a box",
        ),
    ],
)
def test_what_is_wrong_is_one_message(options, message, tmp_path):
    done = penstock("data", "swe-mutations", *options, "--out", "out", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback (most recent call last)" not in done.stderr  # pytest's own words on a broken file may be there
    import re

    assert re.search(message, done.stderr)
