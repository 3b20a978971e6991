"""From pip, without a clone: the built wheel in an empty environment makes a project and trains it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.conftest import REPOSITORY, assert_accounts_balance

pytestmark = [
    pytest.mark.deep,
    *(pytest.mark.recipes, pytest.mark.slow, pytest.mark.redis, pytest.mark.bwrap, pytest.mark.torch),
    pytest.mark.timeout(1800),
]
MODEL = REPOSITORY / "recipes/calculator/model"
"""Made in minutes otherwise, which another test of `make_base_model` does for one step."""
SHORT = ("trainer.steps=3", "groups_per_step=2", "agent.workers=1", "data.eval=null")
MOST_BYTES = 3 << 20
Penstock = Callable[..., str]


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


@pytest.fixture(scope="module")
def penstock(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Penstock:
    """Runs the installed `penstock` in a folder, and returns what it printed.

    Dependencies are those of this environment, put on the path behind the new one's own packages: `.pth` files there
    are not followed, so that the editable Penstock is not found.
    """
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=True)
    run([environment / "bin/python", "-m", "pip", "install", "-q", "--no-index", "--no-deps", wheel], environment)
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    cache = tmp_path_factory.mktemp("cache")

    def call(folder: Path, program: str, *arguments: str) -> str:
        return run([environment / "bin" / program, *arguments], folder, XDG_CACHE_HOME=str(cache))

    where = call(environment, "python", "-c", "import penstock; print(penstock.__file__)").strip()
    assert Path(where).is_relative_to(environment)
    return call


def run(argv: list[Any], folder: Path, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        list(map(str, argv)),
        cwd=folder,
        env={**inherited, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def test_the_wheel_has_recipes_and_stays_small(wheel: Path, penstock: Penstock, tmp_path: Path) -> None:
    assert wheel.stat().st_size <= MOST_BYTES
    listed = penstock(tmp_path, "penstock", "recipes")
    assert "search_r1/cpu.yaml" in listed
    shipped = Path(listed.partition(":\n")[0])
    assert (shipped / "calculator.yaml").is_file()
    assert not (shipped / "calculator/model").exists()


def test_a_project_of_the_wheel_trains(penstock: Penstock, tmp_path: Path) -> None:
    """As its README says, the base model apart."""
    penstock(tmp_path, "penstock", "init", "mine")
    project = tmp_path / "mine"
    shutil.copytree(MODEL, project / "model")
    check = ("recipe.yaml", "--policy", "policies.py:oracle", "--rows", "16", "--expect", "1")
    penstock(project, "penstock", "rehearse", *check)
    penstock(project, "penstock", "run", "recipe.yaml", *SHORT)
    summary = json.loads((project / "runs/calculator/summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["reward_first"] > 0, "the base model solves some"
    assert_accounts_balance(summary)


def test_quickstart_of_the_wheel_trains(penstock: Penstock, tmp_path: Path) -> None:
    said = penstock(tmp_path, "penstock", "quickstart", f"model={MODEL}", *SHORT)
    assert "page: 127.0.0.1, port " in said
    (found,) = (tmp_path / "runs").glob("quickstart-*/summary.json")
    summary = json.loads(found.read_text())
    assert summary["steps"] == 3
    assert_accounts_balance(summary)
