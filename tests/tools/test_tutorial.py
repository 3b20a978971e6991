"""docs/guide/tool.md: its files are written out, its programs run, and they print what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

from penstock.tools import ToolConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guide/tool.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def test_tutorial_programs_print_what_the_page_shows(tmp_path: Path) -> None:
    programs = []
    for language, text in BLOCKS:
        if language == "python":
            name = text.splitlines()[0].removeprefix("# ")
            (tmp_path / name).write_text(text)
            programs += [name] if name.startswith("try_") else []
    shown = [text for language, text in BLOCKS if language == "text"]
    assert [_output(tmp_path, program) for program in programs] == shown
    assert len(shown) == 2


def _output(folder: Path, program: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, program],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout or done.stderr


def test_tutorial_recipes_part_is_valid() -> None:
    (text,) = [text for language, text in BLOCKS if language == "yaml"]
    (config,) = [ToolConfig.model_validate(entry) for entry in yaml.safe_load(text)["tools"]]
    assert (config.name, config.max_output_tokens) == ("money.py:convert", 200)
