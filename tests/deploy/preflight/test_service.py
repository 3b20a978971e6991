"""`penstock doctor --serve`, and what `penstock serve` refuses before it starts anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.preflight.preflight_support import RECIPE
from typer.testing import CliRunner, Result

from penstock.deploy import app

pytestmark = [pytest.mark.redis, pytest.mark.torch]
RANK = "trainer.lora.rank=8"


def invoke(*words: str, **environment: str) -> Result:
    return CliRunner().invoke(app, [*words], env=environment)


def checks_of(*overrides: str, **environment: str) -> dict[str, dict[str, Any]]:
    result = invoke("doctor", str(RECIPE), "--serve", "--json", *overrides, **environment)
    return {check["name"]: check for check in json.loads(result.stdout)["checks"]}


def test_a_recipe_that_can_be_served_is_told_its_room_for_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.deploy.preflight.disk.SLOW_SYNC_S", 600.0)  # other work may keep the disk busy
    recipe = tmp_path / "serve.yaml"
    recipe.write_text(f"name: mine\nmodel: {RECIPE.parent / 'calculator' / 'model'}\nruns_dir: {tmp_path}/runs\n")
    result = invoke("doctor", str(recipe), "--serve", "--json", RANK)
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert ([one for one in checks.values() if not one["ok"]], result.exit_code) == ([], 0)
    assert {"service", "keys", "model", "memory", "adapters"} <= checks.keys()
    assert "rank 8" in checks["adapters"]["found"]
    assert not {"data", "agent.loop", "sandbox", "staleness in flight"} & checks.keys()
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("override", "name", "fix"),
    [
        ("trainer.lora.rank=0", "service", "trainer.lora.rank"),
        ("trainer.ranks=2", "service", "trainer.ranks"),
        ("trainer.lora.targets=[q_proj, experts]", "service", "trainer.lora.targets"),
        ("model=nowhere", "model", ""),
        (f"transfer_queue.max_bytes={1 << 50}", "memory", "transfer_queue.max_bytes"),
        (f"transfer_queue.max_bytes={1 << 50}", "adapters", "transfer_queue.max_bytes"),
    ],
)
def test_what_cannot_be_served_fails_with_a_fix(override: str, name: str, fix: str, tmp_path: Path) -> None:
    check = checks_of(f"runs_dir={tmp_path}", RANK, override)[name]
    assert (check["ok"], fix in check["found"] + check["fix"]) == (False, True), check


def test_bad_keys_are_named_by_their_owner_alone(tmp_path: Path) -> None:
    check = checks_of(f"runs_dir={tmp_path}", RANK, PENSTOCK_SERVICE_KEYS="alice=secret-of-alice")["keys"]
    assert (check["ok"], "alice" in check["found"]) == (False, True)
    assert "secret-of-alice" not in json.dumps(check)


def test_a_doomed_service_is_refused_before_it_begins(tmp_path: Path) -> None:
    result = invoke("serve", str(RECIPE), f"runs_dir={tmp_path}", "model=nowhere", "trainer.ranks=2")
    assert result.exit_code == 2
    for line in ("model: nowhere", "trainer.ranks", "fix: "):
        assert line in result.stderr
    assert list(tmp_path.iterdir()) == []
