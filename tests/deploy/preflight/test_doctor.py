"""`penstock doctor` and the refusals of `penstock run` as a person sees them; each fault is in `test_faults` and
`test_machine_faults`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.deploy.preflight.preflight_support import RECIPE
from typer.testing import CliRunner, Result

from penstock.deploy import app, run_recipe
from penstock.deploy.preflight.suite import FACTS, TRIALS

pytestmark = [pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch]


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *words])


def test_a_sound_recipe_has_no_failing_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.deploy.preflight.disk.SLOW_SYNC_S", 600.0)  # other work may keep the disk busy
    result = invoke(str(RECIPE), "--json", f"runs_dir={tmp_path}")
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    told = json.loads(result.stdout)
    assert [check for check in told["checks"] if not check["ok"]] == []
    assert (told["ok"], result.exit_code) == (True, 0)
    names = [check["name"] for check in told["checks"]]
    assert len(names) == len(set(names))
    assert len(names) >= len(FACTS) + len(TRIALS) - 12, "each has something to say, but where nothing is asked of it"
    assert {"containment: network", "containment: processes", "containment: host files", "disk", "memory"} <= set(names)


def test_several_faults_are_told_together_and_in_words(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    result = invoke(str(RECIPE), f"data.train={rows}", "trainer.correction=null", "agent.loop=tool_agnt")
    assert result.exit_code == 1
    for line in ("FAIL  data:", "FAIL  trainer.correction:", "FAIL  agent.loop:", "fix: "):
        assert line in result.stdout
    assert "3 FAIL" in result.stdout.splitlines()[-1]


def test_a_doomed_run_is_refused_before_it_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [f"runs_dir={tmp_path}", "model=nowhere", "data.train=none.jsonl", "agent.loop=none.py:Loop"]
    for dry_run in (True, False):
        assert run_recipe(RECIPE, wrong, resume=False, dry_run=dry_run) == 2
        printed = capsys.readouterr()
        assert ("model: nowhere" in printed.out) == dry_run, "the resolved recipe"
        for line in ("model: nowhere", "data: dataset none.jsonl", "agent.loop: no file 'none.py'"):
            assert line in printed.err
    assert list(tmp_path.iterdir()) == []


def test_resume_of_an_unknown_run_is_refused_with_the_nearest_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sums-one", "words"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("{}")
        (tmp_path / name / "metrics.jsonl").write_text("{}")
    assert run_recipe(RECIPE, [f"runs_dir={tmp_path}", "name=sums-on"], resume=True, dry_run=False) == 2
    printed = capsys.readouterr().err
    for part in ("name: ", "did you mean 'sums-one'? (known: sums-one, words)", "fix: ", "--resume"):
        assert part in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sums-one", "words"]


def test_a_recipe_that_cannot_be_read_is_one_message() -> None:
    assert "no such recipe" in invoke("no.yaml").stderr
    assert json.loads(invoke("no.yaml", "--json").stdout)["ok"] is False
    assert "RECIPE is missing" in invoke().stderr
