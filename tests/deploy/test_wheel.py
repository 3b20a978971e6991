"""From pip, without a clone: the built wheel in an empty environment makes projects and trains them."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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

    Dependencies are those of this environment, put on the path behind the new one's own packages: `.pth` files there
    are not followed, so that the editable Penstock is not found.
    """

    def __init__(self, wheel: Path, environment: Path, cache: Path) -> None:
        self.bin = environment / "bin"
        self._cache = cache
        venv.create(environment, with_pip=True)
        self.run(environment, "python", "-m", "pip", "install", "-q", "--no-index", "--no-deps", str(wheel))
        packages = next(environment.glob("lib/python*/site-packages"))
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(self, folder: Path, program: str, *arguments: str, **variables: str) -> str:
        """Runs a program of the environment in `folder`, and returns what it printed."""
        ended = subprocess.run(
            [self.bin / program, *arguments],
            cwd=folder,
            env=self._variables(variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout
        return ended.stdout

    @contextmanager
    def beside(
        self, folder: Path, program: str, *arguments: str, **variables: str
    ) -> Iterator[subprocess.Popen[bytes]]:
        """The same in the background, ended at the end of the block; its output is in FOLDER/beside.log."""
        with (folder / "beside.log").open("ab") as log:
            process = subprocess.Popen(
                [self.bin / program, *arguments], cwd=folder, env=self._variables(variables), stdout=log, stderr=log
            )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(120)

    def _variables(self, given: Mapping[str, str]) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return {**inherited, "XDG_CACHE_HOME": str(self._cache), **given}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    made = Installed(wheel, tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("cache"))
    where = made.run(made.bin, "python", "-c", "import penstock; print(penstock.__file__)").strip()
    assert Path(where).is_relative_to(made.bin.parent)
    return made


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def assert_trained(root: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((root / "summary.json").read_text())
    assert summary["steps"] == 3
    assert_accounts_balance(summary)
    return summary


def test_the_wheel_has_recipes_and_stays_small(wheel: Path, installed: Installed, tmp_path: Path) -> None:
    assert wheel.stat().st_size <= MOST_BYTES
    listed = installed.run(tmp_path, "penstock", "recipes")
    assert "search_r1/cpu.yaml" in listed
    shipped = Path(listed.partition(":\n")[0])
    assert (shipped / "calculator.yaml").is_file()
    assert not (shipped / "calculator/model").exists()


def test_a_calculator_project_trains(installed: Installed, tmp_path: Path) -> None:
    """As its README says, the base model apart."""
    project = tmp_path / "mine"
    installed.run(tmp_path, "penstock", "init", "mine")
    shutil.copytree(MODEL, project / "model")
    check = ("recipe.yaml", "--policy", "policies.py:oracle", "--rows", "16", "--expect", "1")
    installed.run(project, "penstock", "rehearse", *check)
    installed.run(project, "penstock", "run", "recipe.yaml", *SHORT)
    assert assert_trained(project / "runs/calculator")["reward_first"] > 0, "the base model solves some"


def test_quickstart_trains(installed: Installed, tmp_path: Path) -> None:
    said = installed.run(tmp_path, "penstock", "quickstart", f"model={MODEL}", *SHORT)
    assert "page: 127.0.0.1, port " in said
    (found,) = (tmp_path / "runs").glob("quickstart-*")
    assert_trained(found)


def test_a_retool_project_trains(installed: Installed, tmp_path: Path) -> None:
    pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'penstock[math]'")
    project = tmp_path / "mine"
    installed.run(tmp_path, "penstock", "init", "mine", "--from", "retool")
    shutil.copytree(MODEL, project / "model")
    data = ("data.py", "arithmetic", "--out", "data/retool", "--train", "64", "--eval", "8")
    installed.run(project, "python", *data)
    check = ("recipe.yaml", "--policy", "policies.py:oracle", "--rows", "8", "--expect", "1")
    installed.run(project, "penstock", "rehearse", *check)
    installed.run(project, "penstock", "run", "recipe.yaml", *SHORT)
    assert_trained(project / "runs/retool-cpu")


def test_a_search_r1_project_trains(installed: Installed, tmp_path: Path) -> None:
    """With a search server and a cold start of a few steps."""
    pytest.importorskip("tantivy", reason="tantivy is not installed: pip install 'penstock[search]'")
    project, port = tmp_path / "mine", free_port()
    installed.run(tmp_path, "penstock", "init", "mine", "--from", "search_r1")
    installed.run(project, "python", "data.py", "small", "--out", "data/search-r1")
    installed.run(project, "python", "make_model.py", "--out", "data/search-r1/base")
    server = (
        "search-server",
        "--corpus",
        "corpus/corpus.jsonl",
        "--index",
        "data/search-r1/index",
        "--port",
        str(port),
    )
    tools = f"tools=[{{name: search, settings: {{topk: 2, url: 'http://127.0.0.1:{port}/retrieve'}}}}]"
    token = {"PENSTOCK_SEARCH_TOKEN": "only-for-this-test"}
    model = ("recipe.yaml", "model=data/search-r1/base", tools)
    with installed.beside(project, "penstock", *server, **token) as process:
        wait_for(lambda: is_listening(port), process, project / "beside.log")
        check = ("--policy", "policies.py:oracle", "--rows", "8")
        installed.run(project, "penstock", "rehearse", *model, *check, "--expect", "1", **token)
        cold = ("sft.policy=policies.py:oracle", "sft.policy_rows=8", "sft.steps=4")
        installed.run(project, "penstock", "sft", *model, *cold, **token)
        installed.run(project, "penstock", "run", "recipe.yaml", tools, "group_size=4", *SHORT, **token)
    assert_trained(project / "runs/search-r1-cpu")


def test_an_openai_project_trains(installed: Installed, tmp_path: Path) -> None:
    pytest.importorskip("agents", reason="the OpenAI Agents SDK (openai-agents) is not installed")
    project, port = tmp_path / "mine", free_port()
    installed.run(tmp_path, "penstock", "init", "mine", "--from", "openai")
    shutil.copytree(MODEL, project / "model")
    root = project / "runs/openai-agent"
    agent = ("agent.py", "--url", f"http://127.0.0.1:{port}", "--concurrency", "6")
    overrides = ("trainer.steps=3", "groups_per_step=2", f"rollout.port={port}")
    with installed.beside(project, "penstock", "run", "recipe.yaml", *overrides) as run:
        wait_for(lambda: (root / "connect.env").exists() and is_listening(port), run, project / "beside.log")
        found = re.search(r"PENSTOCK_TOKEN=(\S+)", (root / "connect.env").read_text())
        assert found
        with installed.beside(project, "python", *agent, PENSTOCK_TOKEN=found[1]):
            run.wait(600)
    assert run.returncode == 0, (project / "beside.log").read_text()
    assert_trained(root)


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
