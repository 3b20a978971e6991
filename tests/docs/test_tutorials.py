"""The tutorials' code as it stands: `# file.py` blocks are written, `try_*.py` are run, commands are checked."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from penstock.agent_loops.registry import find_loop
from penstock.deploy.load_config import load_config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "tutorials" / name for name in ("my_first_loop.md", "openai_agent.md")]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(page.read_text()) if found == language]


@pytest.fixture(params=PAGES, ids=lambda page: page.stem)
def written(request, tmp_path):
    """(page, folder with its files)"""
    for text in blocks(request.param, "python"):
        name = re.match(r"# (\w+\.py)\n", text)
        assert name is not None, text
        (tmp_path / name[1]).write_text(text)
    return request.param, tmp_path


def test_every_program_of_a_tutorial_runs(written, tokenizer_for, monkeypatch):
    _, folder = written
    tokenizer_for("qwen2_5").save_pretrained(folder / "model")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MODEL", "model")
    monkeypatch.setattr(sys, "path", [*sys.path])
    programs = sorted(folder.glob("try_*.py"))
    assert len(programs) == 2
    for program in programs:
        runpy.run_path(str(program), run_name="__main__")


def test_every_command_names_what_there_is(written, monkeypatch):
    page, folder = written
    monkeypatch.chdir(folder)
    commands = [shlex.split(line) for text in blocks(page, "") for line in text.splitlines() if "penstock run" in line]
    assert commands
    for _, _, recipe, *overrides in commands:
        config = load_config(ROOT / recipe, overrides)
        assert find_loop(config.agent.loop, folder).__module__
