"""Tasks made of two real packages, once for all tests."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.sandbox.conftest import skip_missing_backends

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes" / "swe"
PER_PACKAGE = 2


@dataclass(frozen=True)
class Data:
    folder: Path
    said: str

    @property
    def tasks(self) -> Path:
        return self.folder / "data/swe/train.parquet"


def penstock(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command as a person gives it."""
    return python("-m", "penstock.deploy.cli", *arguments, cwd=cwd)


def python(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=550, check=False)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Data:
    folder = tmp_path_factory.mktemp("swe-recipe")
    packages = [
        ("--package", name, "--tests", RECIPE / "package_tests" / name) for name in ("mdurl", "sortedcontainers")
    ]
    options = [one for package in packages for one in package]
    done = penstock(
        "data", "swe-mutations", *options, "--count", PER_PACKAGE, "--seed", 7, "--out", "data/swe", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return Data(folder, done.stdout)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_missing_backends(items, Path(__file__).parent)
