"""R2E-Gym's rows as tasks of ours: hidden tests from the row itself, never from its image.

`execution_result_content` has the tests' files and pytest's logs before and after the fix; `parsed_commit_content` has
the fix. FAIL_TO_PASS is what the logs say, held against `expected_output_json`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from penstock.datasets.swe.rows import BadRow, Fields, Raw, mapping, text, texts
from penstock.datasets.swe.store import TreeStore

PYTHON = "/opt/venv/bin/python"
"""recipes/swe/Dockerfile moves it there: in the repository it would be copied into every box."""
_ANSI = re.compile(r"\x1b\[[0-9;]*m|\r")
_SUMMARY = "short test summary info"


def r2e_task(row: Raw, scratch: TreeStore) -> Fields:
    """Without a place for its repository: `places` adds that. Raises `BadRow` naming the field."""
    ran = mapping(row, "execution_result_content")
    commit = mapping(row, "parsed_commit_content")
    before, after = _outcomes(ran, "old_commit_res_stdout"), _outcomes(ran, "new_commit_res_stdout")
    passed = [test for test, outcome in after.items() if outcome == "PASSED"]
    # Both name the same tests as passed: `expected_output_json` without their files.
    expected = mapping(row, "expected_output_json")
    listed = {_ANSI.sub("", name).split(" - ")[0] for name, outcome in expected.items() if outcome == "PASSED"}
    if only := sorted(listed ^ {".".join(test.split("::")[1:]) for test in passed}):
        raise BadRow(f"field 'expected_output_json' and the log of the fixed commit disagree, first about {only[0]!r}")
    fail_to_pass = [test for test in passed if before.get(test) != "PASSED"]
    if not fail_to_pass:
        raise BadRow("field 'execution_result_content': no test fails before the fix and passes after it")
    statement = text(row, "problem_statement")
    names, codes = texts(ran, "test_file_names"), texts(ran, "test_file_codes")
    if len(names) != len(codes):
        raise BadRow(f"field 'execution_result_content': {len(names)} test_file_names, {len(codes)} test_file_codes")
    tests = {f"r2e_tests/{PurePosixPath(name).name}": code.encode() for name, code in zip(names, codes, strict=True)}
    issue = re.search(r"\[ISSUE\](.*)\[/ISSUE\]", statement, re.DOTALL)
    instance_id = f"{text(row, 'repo_name')}-{text(row, 'commit_hash')}"
    return {
        "instance_id": instance_id,
        "repo": text(row, "repo_name"),
        "docker_image": text(row, "docker_image"),
        "problem_statement": (issue[1] if issue else statement).strip(),
        "FAIL_TO_PASS": fail_to_pass,
        "PASS_TO_PASS": [test for test in passed if test not in fail_to_pass],
        "test_patch": _diff(scratch, {}, tests),
        "patch": _fix(commit, scratch),
        "test_command": f"PYTHONWARNINGS=ignore {PYTHON} -m pytest",
    }


def _outcomes(ran: Mapping[str, Any], field: str) -> dict[str, str]:
    """test id → how it ended, from the summary of ``pytest -rA``."""
    log = _ANSI.sub("", str(ran.get(field) or ""))
    if _SUMMARY not in log:
        raise BadRow(f"field 'execution_result_content': {field} holds no summary of pytest -rA")
    line = re.compile(r"^(PASSED|FAILED|ERROR) (\S+\.py::.+?)(?: - .*)?$", re.MULTILINE)
    return {test: outcome for outcome, test in line.findall(log.rpartition(_SUMMARY)[2])}


def _fix(commit: Mapping[str, Any], scratch: TreeStore) -> str:
    """The changes of the commit that are no tests."""
    before: dict[str, bytes] = {}
    after: dict[str, bytes] = {}
    for one in commit.get("file_diffs") or ():
        path = str(((one.get("header") or {}).get("file") or {}).get("path") or "")
        if not path:
            raise BadRow("field 'parsed_commit_content': a file_diff has no header.file.path")
        *folders, name = PurePosixPath(path).parts
        if {"test", "tests"} & {*folders, name} or name.startswith("test_") or name.endswith("_test.py"):
            continue
        for side, key in ((before, "old_file_content"), (after, "new_file_content")):
            if one.get(key):
                side[path] = str(one[key]).encode()
    patch = _diff(scratch, before, after)
    if not patch:
        raise BadRow("field 'parsed_commit_content' changes nothing besides tests")
    return patch


def _diff(scratch: TreeStore, before: Mapping[str, bytes], after: Mapping[str, bytes]) -> str:
    return scratch.diff(scratch.commit("before", before), scratch.commit("after", after)).decode()
