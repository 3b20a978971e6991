"""The doctor finds each planted fault and names its fix; a sound recipe has none."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.deploy.preflight import faults_of_machines, faults_of_models, faults_of_recipes, faults_of_services
from tests.deploy.preflight.planting import FAULTS, MODEL, RECIPE, Fault, Place
from typer.testing import CliRunner, Result

from penstock.deploy import app, load_config
from penstock.deploy.preflight.check import Check
from penstock.deploy.preflight.settings import check_concurrency
from penstock.deploy.preflight.suite import FACTS, TRIALS

pytestmark = [pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch]
PLANTS = (faults_of_machines, faults_of_models, faults_of_recipes, faults_of_services)


def ask(fault: Fault, overrides: Iterable[str]) -> list[Check]:
    found = fault.asked(load_config(RECIPE, list(overrides)))
    return [found] if isinstance(found, Check) else list(found or ())


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.title for fault in FAULTS])
async def test_each_planted_fault_is_found_and_its_mend_named(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fault.plant(Place(tmp_path, monkeypatch)) as overrides:
        checks = await asyncio.to_thread(ask, fault, overrides)
    failed = {check.name: check for check in checks if not check.ok}
    assert fault.check in failed, checks
    assert re.search(fault.fix, failed[fault.check].fix), failed[fault.check]


def test_there_are_twenty_and_more() -> None:
    assert len(FAULTS) >= 20
    assert len({fault.asked for fault in FAULTS}) >= 15, "of many kinds"


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *words])


def test_a_sound_recipe_has_no_failing_check(tmp_path: Path) -> None:
    result = invoke(str(RECIPE), "--json", f"runs_dir={tmp_path}")
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    told = json.loads(result.stdout)
    assert [check for check in told["checks"] if not check["ok"]] == []
    assert (told["ok"], result.exit_code) == (True, 0)
    names = [check["name"] for check in told["checks"]]
    assert len(names) == len(set(names))
    assert len(names) >= len(FACTS) + len(TRIALS) - 7, "each has something to say, but where nothing is asked of it"
    assert {"containment: network", "containment: processes", "containment: host files", "disk", "memory"} <= set(names)


@pytest.mark.parametrize(
    ("concurrency", "verdict", "said"),
    [
        (96, "ok", r"192 episodes at once of 192"),
        (32, "ok", r"64 episodes at once of 192 .*agent\.concurrency=96"),
        (31, "warn", r"62 episodes at once of 192 .*a step has 64"),
    ],
)
def test_fewer_places_than_staleness_admits(concurrency: int, verdict: str, said: str) -> None:
    """A step of the recipe has 8 groups of 8, and two later ones may be under way beside it."""
    check = check_concurrency(load_config(RECIPE, [f"agent.concurrency={concurrency}"]))
    assert check.verdict == verdict
    assert re.search(said, check.found)
    assert (check.fix != "") == (verdict == "warn")


def test_several_faults_are_told_together_and_in_words(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    result = invoke(str(RECIPE), f"data.train={rows}", "trainer.correction=null", "agent.loop=tool_agnt")
    assert result.exit_code == 1
    for line in ("FAIL  data:", "FAIL  trainer.correction:", "FAIL  agent.loop:", "fix: "):
        assert line in result.stdout
    assert "3 FAIL" in result.stdout.splitlines()[-1]


def test_a_doomed_run_is_refused_with_the_same_words(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["run", str(RECIPE), f"runs_dir={tmp_path}", "model=./no/such/model"])
    assert result.exit_code == 2
    assert list(tmp_path.iterdir()) == [], "nothing was begun"


def test_a_recipe_that_cannot_be_read_is_one_message() -> None:
    assert "no such recipe" in invoke("no.yaml").stderr
    assert json.loads(invoke("no.yaml", "--json").stdout)["ok"] is False
    assert "RECIPE is missing" in invoke().stderr
    assert MODEL.is_dir()
