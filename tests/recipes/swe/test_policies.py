"""The environment proven without a model: who knows the patch earns 1 on every task, who does nothing 0."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from tests.recipes.swe.conftest import PER_PACKAGE, RECIPE, python
from tests.sandbox.containers import IMAGE

from penstock.agent_loops import load_object
from penstock.sandbox import SandboxConfig
from penstock.trainer import load_rows

pytestmark = [pytest.mark.deep, pytest.mark.recipes]
LIMITS = {"memory_mb": 1024, "tmp_mb": 256, "cpu_s": 600, "pids": 256, "run_timeout_s": 60.0, "max_boxes": 1}
BACKENDS = [pytest.param("bwrap", marks=pytest.mark.bwrap), pytest.param("docker", marks=pytest.mark.docker)]


@pytest.fixture(scope="module")
def proving():
    """recipes/swe/prove.py, as a module."""
    return sys.modules[load_object("prove.py:prove", RECIPE).__module__]


@pytest.mark.bwrap
def test_oracle_and_null_on_every_task(data):
    done = python(RECIPE / "prove.py", data.tasks, "--repositories", "data/swe", cwd=data.folder)
    count = 2 * PER_PACKAGE
    assert done.stdout.split("\n")[:2] == [f"oracle: {count} of {count} earned 1", f"null: {count} of {count} earned 0"]
    assert done.returncode == 0, done.stderr


@pytest.fixture(params=BACKENDS)
def world(request, data, proving):
    sandbox = SandboxConfig(backend=request.param, image=IMAGE, **LIMITS)
    return proving.World(sandbox, data.folder / "data/swe")


async def test_the_policies_go_through_tools_boxes_and_grading(world, data, proving):
    row = load_rows(data.tasks)[0]
    right = await proving.play(row, "oracle", world)
    seen, edited, *_, done = right.extra["tool_results"][1:]
    assert right.extra["tool_results"][0].splitlines()[0] == "LICENSE"
    assert seen.lstrip().startswith("1\t")
    assert " now reads:\n" in edited
    assert done == "submitted"
    assert (right.reward, right.outcome.kind) == (1.0, "completed")
    nothing = await proving.play(row, "null", world)
    assert "snapshot" in nothing.extra["tool_results"][1]
    assert (nothing.reward, nothing.outcome.kind) == (0.0, "completed")


async def test_another_tasks_patch_earns_nothing(world, data, proving):
    first, second = load_rows(data.tasks)[:2]
    wrong = replace(first, extra_info={**first.extra_info, "patch": second.extra_info["patch"]})
    assert (await proving.play(wrong, "oracle", world)).reward == 0.0


def test_edits_are_made_of_plain_hunks_alone():
    edits_of = load_object("policies.py:edits_of", RECIPE)
    hunk = "@@ -1,3 +1,3 @@ def f():\n one\n-two\n+2\n three\n"
    head = "diff --git a/m.py b/m.py\nindex 1..2 100644\n--- a/m.py\n+++ b/m.py\n"
    expected = {"path": "m.py", "old_text": "one\ntwo\nthree\n", "text": "one\n2\nthree\n"}
    assert edits_of(head + hunk) == [expected]
    assert edits_of(head + hunk + hunk) == [expected, expected]
    for other in ("new file mode 100644\n", "deleted file mode 100644\n", "rename from a\n"):
        assert edits_of(head.replace("index", other + "index") + hunk) is None
    assert edits_of(head + hunk + "\\ No newline at end of file\n") is None
    assert edits_of("") is None
