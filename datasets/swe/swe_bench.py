"""SWE-bench's rows, and those of its kin (Verified, Lite, SWE-Gym, SWE-rebench) as tasks of ours.

A test's id is as the repository's own runner printed it. Most run pytest; Django's and sympy's ids are rewritten, and
a row whose ids are ambiguous is refused with its reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.datasets.swe.rows import BadRow, Fields, Raw, text, texts


@dataclass(frozen=True)
class Kind:
    """Facts of one dataset that its rows do not say."""

    image: str
    """Image of a row's box, as published; ``{id}`` is its instance_id as image names may be written."""
    separator: str
    """Text in it in place of the ``__`` of an instance_id."""
    python: str
    """Python of the environment in the image."""

    def published(self, instance_id: str) -> str:
        return self.image.format(id=instance_id.replace("__", self.separator).lower())


SWE_BENCH = Kind("swebench/sweb.eval.x86_64.{id}:latest", "_1776_", "/opt/miniconda3/envs/testbed/bin/python")
SWE_GYM = Kind("xingyaoww/sweb.eval.x86_64.{id}:latest", "_s_", "/opt/miniconda3/envs/testbed/bin/python")


def swe_bench_task(row: Raw, kind: Kind) -> Fields:
    """Without a place for its repository: `places` adds that. Raises `BadRow` naming the field."""
    repo, test_patch = text(row, "repo"), text(row, "test_patch")
    names = {key: texts(row, key, may_be_empty=key == "PASS_TO_PASS") for key in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    command, tests = f"{kind.python} -m pytest", names
    if repo == "django/django":
        command = f"{kind.python} tests/runtests.py --verbosity 0 --parallel 1 {{test}}"
        tests = {key: _django_labels(value, key) for key, value in names.items()}
    elif repo == "sympy/sympy":
        tests = {key: _sympy_ids(value, test_patch, key) for key, value in names.items()}
    elif strange := [one for one in names["FAIL_TO_PASS"] if ".py" not in one]:
        raise BadRow(f"field 'FAIL_TO_PASS' holds {strange[0]!r}, which is not an id of pytest (FILE.py::TEST)")
    return {
        "instance_id": text(row, "instance_id"),
        "repo": repo,
        "base_commit": text(row, "base_commit"),
        "problem_statement": text(row, "problem_statement"),
        **tests,
        "test_patch": test_patch,
        "patch": text(row, "patch"),
        "test_command": command,
    }


def _django_labels(ids: list[str], field: str) -> list[str]:
    """``test_a (app.tests.CaseTests)`` → ``app.tests.CaseTests.test_a``; newer Pythons write the name twice."""
    labels = []
    for one in ids:
        match = re.fullmatch(r"(\w+) \(([\w.]+)\)", one.strip())
        if match is None:
            raise BadRow(f"field {field!r} holds {one[:80]!r}, a docstring: no runner finds a test by that")
        name, path = match.groups()
        labels.append(path if path.endswith(f".{name}") else f"{path}.{name}")
    return labels


def _sympy_ids(names: list[str], test_patch: str, field: str) -> list[str]:
    """Bare function names; the file is the only one that the test patch changes."""
    files = list(dict.fromkeys(re.findall(r"^\+\+\+ b/(\S*test\S*\.py)\s*$", test_patch, re.MULTILINE)))
    if any("::" in name for name in names):
        return names
    if len(files) != 1:
        raise BadRow(f"field {field!r} holds bare names, and test_patch changes {len(files)} files they may be in")
    return [f"{files[0]}::{name}" for name in names]
