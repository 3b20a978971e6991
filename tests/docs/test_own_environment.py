"""docs/guide/environment.md, from an empty folder to a trained model."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.pages import ROOT, fences

from penstock.datasets import materialise
from penstock.deploy import load_config
from penstock.trainer import load_rows

PAGE = "docs/guide/environment.md"

pytestmark = [pytest.mark.redis, pytest.mark.torch, pytest.mark.timeout(1800)]


def run(folder: Path, *words: str) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ended = subprocess.run(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1500, check=False
    )
    assert ended.returncode == 0, ended.stdout.decode()
    return ended.stdout.decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for fence in fences(PAGE):
        if fence.file:
            (tmp_path / fence.file).write_text(fence.text)
    return tmp_path


def commands() -> list[list[str]]:
    return [shlex.split(line) for fence in fences(PAGE) if fence.language == "bash" for line in fence.text.splitlines()]


def test_the_file_is_the_shipped_one_and_short(folder: Path) -> None:
    shown = (folder / "doors.py").read_text().partition("\n")[2]
    assert shown == (ROOT / "recipes/own_environment/doors.py").read_text()
    assert len(shown.splitlines()) <= 35
    (short,) = [fence.text for fence in fences("README.md") if fence.file == "doors.py"]
    assert short[short.index("class") :] in shown


def test_the_environment_is_proven_without_a_model(folder: Path) -> None:
    proven, stubborn, adds = (words for words in commands() if words[1] == "rehearse")
    assert "64 completed" in run(folder, *proven, "--rows", "64")
    figures = json.loads(run(folder, *stubborn, "--json"))
    assert 0 < figures["reward"]["mean"] < 0.5
    run(folder, *adds, "--rows", "8")


def test_the_final_model_is_asked_as_in_training(folder: Path) -> None:
    """Without the system message of the rows it takes other doors."""
    (shown,) = re.findall(r"SYSTEM = (\(.*?\))", (folder / "use.py").read_text(), re.DOTALL)
    train = load_config(folder / "doors.py").data.train
    (first, *_) = load_rows(materialise(train, folder))[0].messages
    assert ast.literal_eval(shown) == first["content"]


@pytest.mark.deep
def test_the_tutorial_reaches_its_reward(folder: Path) -> None:
    """Command by command, as the page has them."""
    said = [run(folder, *words) for words in commands()]
    means = [float(re.search(r"avg@4\D*([\d.]+)", text)[1]) for text in said if "avg@4" in text]  # type: ignore[index]
    before, after, with_tool = means
    assert before < 0.25
    assert after > before + 0.25
    assert with_tool >= 0.6
    assert json.loads((folder / "runs/doors/summary.json").read_text())["reward_last"] >= 0.45
    for program in ("worst.py", "use.py"):
        assert run(folder, sys.executable, program).strip()
