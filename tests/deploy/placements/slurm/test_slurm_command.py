"""`penstock slurm` without a Slurm: what it prints, writes and refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.deploy.conftest import RECIPE
from typer.testing import CliRunner, Result

from penstock.deploy import app

SBATCH = """#!/bin/sh
env >{folder}/environment
echo "$@" >{folder}/submitted
echo '4711;cluster'
"""


def penstock(*words: str) -> Result:
    return CliRunner().invoke(app, ["slurm", *words])


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(SBATCH.format(folder=tmp_path))
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path / "submitted"


def test_print_writes_nothing(tmp_path: Path) -> None:
    result = penstock(str(RECIPE), "name=sums", f"runs_dir={tmp_path}", "--nodes", "2", "--time", "10", "--print")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("#!/bin/bash\n")
    assert "#SBATCH --time=10\n" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_written_and_submitted_without_secrets(tmp_path, sbatch: Path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN", "a-token-of-mine")
    words = (str(RECIPE), "name=sums", f"runs_dir={tmp_path}", "--nodes", "2", "--setup", "true")
    result = penstock(*words)
    assert result.exit_code == 0, result.output
    folder = tmp_path / "sums" / "slurm"
    assert result.stdout == f"job 4711: {folder / 'run.sbatch'}\n"
    assert sbatch.read_text() == f"--parsable {folder / 'run.sbatch'}\n"
    assert (tmp_path / "sums" / "logs").is_dir(), "Slurm makes no folder for a job's output"
    script = (folder / "run.sbatch").read_text()
    secrets = [line.partition("=")[2] for file in folder.glob("*.env") for line in file.read_text().splitlines()]
    assert "a-token-of-mine" in secrets
    assert not any(secret in script for secret in secrets if len(secret) > 8)
    assert "a-token-of-mine" not in (tmp_path / "environment").read_text()


def test_an_earlier_run_is_gone_on_with_on_purpose_only(tmp_path: Path, sbatch: Path) -> None:
    words = (str(RECIPE), "name=sums", f"runs_dir={tmp_path}")
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "config.yaml").write_text("")
    result = penstock(*words)
    assert result.exit_code == 2
    assert "--resume continues it" in result.stderr
    assert not sbatch.exists()
    assert penstock(*words, "--resume").exit_code == 0


def test_submit_without_slurm_writes_the_script(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = penstock(str(RECIPE), "name=sums", f"runs_dir={tmp_path}")
    assert result.exit_code == 2
    assert "no sbatch on this machine" in result.stderr
    assert (tmp_path / "sums" / "slurm" / "run.sbatch").is_file()


def test_joining_needs_a_run(tmp_path: Path) -> None:
    result = penstock("join", str(tmp_path), "--array", "0-3")
    assert result.exit_code == 2
    assert "no run has started there" in result.stderr
