"""The environment proven without a model: who knows the patch earns 1 on every task, who does nothing 0."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.recipes.swe.conftest import PER_PACKAGE, RECIPE, Data
from tests.sandbox.containers import IMAGE

from penstock.agent_loops import load_object
from penstock.deploy import RunConfig, load_config, rehearse_recipe, rows_of
from penstock.testing import EnvCheck
from penstock.trainer import DatasetRow

pytestmark = [pytest.mark.deep, pytest.mark.recipes]
BACKENDS = [pytest.param("bwrap", marks=pytest.mark.bwrap), pytest.param("docker", marks=pytest.mark.docker)]
ROOM = ("max_turns=64", "max_new_tokens=200000", "max_response_tokens=1000000", "episode_deadline_s=1800")
"""The tokenizer of the calculator's model writes a token per letter or digit."""


@pytest.fixture(params=BACKENDS)
def config(request: pytest.FixtureRequest, data: Data, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """The shipped recipe, with a model whose tokenizer is here."""
    monkeypatch.chdir(data.folder)
    sandbox = ("backend=" + request.param, f"image={IMAGE}")
    settings = [*(f"agent.{one}" for one in ROOM), *(f"sandbox.{one}" for one in sandbox)]
    return load_config(RECIPE / "cpu.yaml", [f"model={RECIPE.parent / 'calculator/model'}", *settings])


async def play(config: RunConfig, policy: str, rows: list[DatasetRow] | None = None) -> EnvCheck:
    chosen = rows_of(config, "train", 0) if rows is None else rows
    result = await rehearse_recipe(config, load_object(f"policies.py:{policy}", RECIPE), chosen)
    assert result.failures == []
    return result


async def test_the_policies_go_through_tools_boxes_and_grading_on_every_task(config: RunConfig) -> None:
    repaired, untouched = (await play(config, "oracle")).trajectories, (await play(config, "null")).trajectories
    assert [one.reward for one in repaired] == [1.0] * 2 * PER_PACKAGE
    assert [one.reward for one in untouched] == [0.0] * 2 * PER_PACKAGE
    assert {one.outcome.kind for one in (*repaired, *untouched)} == {"completed"}
    first, seen, edited, *_, done = repaired[0].extra["tool_results"]
    assert first.splitlines()[0] == "LICENSE"
    assert seen.lstrip().startswith("1\t")
    assert " now reads:\n" in edited
    assert done == "submitted"
    assert "snapshot" in untouched[0].extra["tool_results"][1]


async def test_another_tasks_patch_earns_nothing(config: RunConfig) -> None:
    first, second = rows_of(config, "train", 2)
    wrong = replace(first, extra_info={**first.extra_info, "patch": second.extra_info["patch"]})
    assert [one.reward for one in (await play(config, "oracle", [wrong])).trajectories] == [0.0]


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
