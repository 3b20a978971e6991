"""From pip, without a clone: the built wheel in an empty environment makes projects and trains them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.conftest import REPOSITORY, assert_accounts_balance

pytestmark = [
    pytest.mark.deep,
    *(pytest.mark.recipes, pytest.mark.slow, pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch),
    pytest.mark.timeout(1800),
]
SHORT = ("trainer.steps=3", "groups_per_step=2", "agent.workers=1", "data.eval=null")
MOST_BYTES = 7 << 20


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of what git would clone, beside the checkout: a build writes into its folder."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (REPOSITORY / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, source / name, follow_symlinks=False)
    argv = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(out), str(source)]
    built = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(out.glob("*.whl"))


class Installed:
    """The wheel in an environment that has nothing else.

    Its dependencies are those of this environment, behind its own packages on the path: `.pth` files there are not
    followed, so that the editable Penstock is not found.
    """

    def __init__(self, wheel: Path, environment: Path, cache: Path) -> None:
        self.bin = environment / "bin"
        self._cache = cache
        venv.create(environment, with_pip=True)
        self.run(environment, "python", "-m", "pip", "install", "-q", "--no-index", "--no-deps", str(wheel))
        packages = next(environment.glob("lib/python*/site-packages"))
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(self, folder: Path, program: str, *arguments: str) -> str:
        """Runs a program of the environment in `folder`, and returns what it printed."""
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        argv, env = [str(self.bin / program), *arguments], {**env, "XDG_CACHE_HOME": str(self._cache)}
        pipe, stdout = subprocess.PIPE, subprocess.STDOUT
        ended = subprocess.run(argv, cwd=folder, env=env, stdout=pipe, stderr=stdout, timeout=900, check=False)
        assert ended.returncode == 0, ended.stdout
        return ended.stdout.decode()


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    installed = Installed(wheel, tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("cache"))
    where = installed.run(installed.bin, "python", "-c", "import penstock; print(penstock.__file__)").strip()
    assert Path(where).is_relative_to(installed.bin.parent)
    return installed


def assert_trained(root: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((root / "summary.json").read_text())
    assert summary["steps"] == 3
    assert_accounts_balance(summary)
    return summary


def test_the_wheel_has_recipes_and_stays_small(wheel: Path, installed: Installed, tmp_path: Path) -> None:
    assert wheel.stat().st_size <= MOST_BYTES
    listed = installed.run(tmp_path, "penstock", "recipes")
    assert "search_r1/cpu.yaml" in listed
    shipped = Path(listed.partition(":\n")[0].rpartition(" in ")[2])
    assert (shipped / "calculator.yaml").is_file()
    assert (shipped / "calculator/model/model.safetensors").is_file()


def test_a_calculator_project_trains(installed: Installed, tmp_path: Path) -> None:
    """As its README says."""
    project = tmp_path / "mine"
    installed.run(tmp_path, "penstock", "init", "mine")
    check = ("recipe.yaml", "--policy", "policies.py:oracle", "--rows", "16", "--expect", "1")
    installed.run(project, "penstock", "rehearse", *check)
    installed.run(project, "penstock", "run", "recipe.yaml", *SHORT)
    assert assert_trained(project / "runs/calculator")["reward_first"] > 0, "the base model solves some"


def test_quickstart_trains(installed: Installed, tmp_path: Path) -> None:
    said = installed.run(tmp_path, "penstock", "quickstart", *SHORT)
    assert "dashboard: http://127.0.0.1:" in said
    (found,) = (tmp_path / "runs").glob("quickstart-*")
    assert_trained(found)
