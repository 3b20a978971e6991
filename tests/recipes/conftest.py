"""The recipes' own files as modules, their data made once, and a search server over the corpus."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from tests.deploy.conftest import LivingRun, assert_accounts_balance, start_run  # noqa: F401 - a fixture

from penstock.agent_loops import load_object
from penstock.deploy import load_config, rehearse_recipe, rows_of
from penstock.testing import EnvCheck

REPOSITORY = Path(__file__).parents[2]
RECIPES = REPOSITORY / "recipes"
PATIENT = ("sandbox.run_timeout_s=100", "agent.episode_deadline_s=250", "agent.concurrency=8")
"""A busy machine must not be taken for code that never ends."""
SEARCH_TOKEN = "only-for-this-test"


def script(name: str) -> ModuleType:
    """`recipes/NAME` as a module of its own: several recipes have a data.py."""
    module_name = f"recipe_{name.replace('/', '_').removesuffix('.py')}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, RECIPES / name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return sys.modules[module_name]


def cold_start(recipe: Path, folder: Path, *settings: str, base: Path = RECIPES / "calculator/model") -> Path:
    """The small model `base` after `penstock sft` on the conversations in `folder`, where it is put."""
    model = folder / "model"
    shown = (f"sft.messages={folder / 'conversations.jsonl'}", f"model={base}")
    command = [sys.executable, "-m", "penstock.deploy.cli", "sft", str(recipe), *shown, f"sft.out={model}", *settings]
    subprocess.run([*command, f"runs_dir={folder / 'sft'}"], check=True, timeout=900)
    return model


def steps_of(run: LivingRun) -> list[dict[str, Any]]:
    """Metrics of each step."""
    return [json.loads(line) for line in (run.root / "metrics.jsonl").read_text().splitlines()]


def assert_learned(
    run: LivingRun, *, window: int, first_most: float, last_least: float, growth: float = 0.0, first_window: int = 0
) -> None:
    """Runs to the goal; mean rewards of the first and last steps, exact tokens, staleness and accounts are as due."""
    summary = run.finish(timeout_s=900)
    rewards = [step["reward"] for step in steps_of(run)]
    first_window = first_window or window
    first, last = sum(rewards[:first_window]) / first_window, sum(rewards[-window:]) / window
    assert first <= first_most, rewards
    assert last >= max(last_least, growth * first), rewards
    assert summary["logprob_abs_diff_mean"] <= 1e-3
    assert summary["staleness_max"] <= 2
    assert_accounts_balance(summary)


async def played(recipe: str, policy: str, *overrides: str, rows: int = 0, split: str = "train") -> EnvCheck:
    """`policy` of the recipe's policies.py on its rows, as `penstock rehearse` plays them."""
    path = RECIPES / recipe
    config = load_config(path, [*PATIENT, *overrides])
    found = load_object(f"{path.parent / 'policies.py'}:{policy}", Path.cwd())
    return await rehearse_recipe(config, found, rows_of(config, split, rows))


@pytest.fixture(scope="session")
def search_r1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small questions and the model that knows nothing yet."""
    folder = tmp_path_factory.mktemp("search-r1")
    script("search_r1/data.py").main(["small", "--out", str(folder)])
    script("search_r1/make_model.py").main(["--out", str(folder / "base")])
    return folder


@pytest.fixture(scope="session")
def two_hops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Search-R1's questions that need two searches, their cold start, and a model whose names are single tokens."""
    folder = tmp_path_factory.mktemp("two-hops")
    script("search_r1/data.py").main(["two_hops", "--out", str(folder)])
    script("search_r1/make_model.py").main(["--whole-names", "--out", str(folder / "base")])
    return folder


@pytest.fixture(scope="session")
def search_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real `penstock search-server` over the recipe's corpus, which tools reach with the token in the environment."""
    pytest.importorskip("tantivy", reason="tantivy is not installed: pip install 'penstock[search]'")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    corpus, index = RECIPES / "search_r1/corpus/corpus.jsonl", tmp_path_factory.mktemp("index") / "index"
    files = ("--corpus", str(corpus), "--index", str(index))
    argv = [sys.executable, "-m", "penstock.deploy.cli", "search-server", *files]
    environment = {**os.environ, "PENSTOCK_SEARCH_TOKEN": SEARCH_TOKEN, "PYTHONPATH": str(REPOSITORY / "src")}
    process = subprocess.Popen([*argv, "--port", str(port)], env=environment, cwd=REPOSITORY)
    try:
        wait_until_up(f"http://127.0.0.1:{port}/health", process)
        yield f"http://127.0.0.1:{port}/retrieve"
    finally:
        process.terminate()
        process.wait(30)


def wait_until_up(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            httpx.get(url, headers={"Authorization": f"Bearer {SEARCH_TOKEN}"}).raise_for_status()
        except httpx.TransportError:
            time.sleep(0.1)
        else:
            return
    pytest.fail(f"the search server did not come up (exit status {process.poll()})")


@pytest.fixture
def searching(search_url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The override that leads the recipe's tool to the server, its token in this process's environment."""
    monkeypatch.setenv("PENSTOCK_SEARCH_TOKEN", SEARCH_TOKEN)

    def override(topk: int = 2) -> str:
        return f"tools=[{{name: search, timeout_s: 40, settings: {{topk: {topk}, url: '{search_url}'}}}}]"

    return override
