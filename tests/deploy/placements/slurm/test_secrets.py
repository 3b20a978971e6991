"""Secrets lie on the shared disk for their owner alone, and nowhere else."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from tests.deploy.conftest import RECIPE

from penstock.deploy import load_config
from penstock.deploy.placements.slurm.submit import write_secrets

FILES = {"owner.env", "trainer.env", "agent.env", "rollout.env", "sandbox.env", "users.acl"}


def values(path: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in path.read_text().splitlines())


def test_each_role_has_its_own_login_in_a_file_of_its_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)
    folder = tmp_path / "slurm"
    write_secrets(folder, load_config(RECIPE))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name for path in folder.iterdir()} == FILES
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    found = {name: values(folder / f"{name}.env") for name in ("owner", "trainer", "agent", "rollout")}
    assert len({one["PENSTOCK_REDIS_PASSWORD"] for one in found.values()}) == 4
    assert {name: one["PENSTOCK_REDIS_USER"].strip("'") for name, one in found.items()} == {
        "owner": "", "trainer": "trainer", "agent": "agent", "rollout": "rollout"}  # fmt: skip
    assert list(values(folder / "sandbox.env")) == ["PENSTOCK_TOKEN"]
    users = (folder / "users.acl").read_text()
    assert [line.split()[1] for line in users.splitlines()] == ["trainer", "agent", "rollout"]
    assert not any(one["PENSTOCK_REDIS_PASSWORD"] in users for one in found.values()), "hashes alone"


def test_a_job_in_the_queue_keeps_its_secrets(tmp_path: Path) -> None:
    write_secrets(tmp_path / "slurm", load_config(RECIPE))
    before = {path.name: path.read_text() for path in (tmp_path / "slurm").iterdir()}
    write_secrets(tmp_path / "slurm", load_config(RECIPE))
    assert {path.name: path.read_text() for path in (tmp_path / "slurm").iterdir()} == before


def test_a_redis_of_ones_own_has_the_login_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS_USER", "me")
    monkeypatch.setenv("PENSTOCK_REDIS_PASSWORD", "it's mine")
    monkeypatch.setenv("PENSTOCK_TOKEN", "known")
    write_secrets(tmp_path, load_config(RECIPE, ["transfer_queue.url=redis://there:6379"]))
    assert (tmp_path / "rollout.env").read_text().splitlines() == [
        "PENSTOCK_REDIS_USER=me",
        "PENSTOCK_REDIS_PASSWORD='it'\"'\"'s mine'",
        "PENSTOCK_TOKEN=known",
    ]
    assert (tmp_path / "users.acl").read_text() == ""
