from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def line() -> dict[str, Any]:
    """As the trainer writes it, with a histogram and names of every kind."""
    return {
        "step": 0,
        "version": 1,
        "reward": 0.25,
        "grad_norm": 1.5,
        "staleness_max": 1,
        "staleness_tokens": {"0": 30, "1": 12},
        "outcome/completed": 4,
        "episode/tool_calls": 1.5,
    }


@pytest.fixture
def record() -> dict[str, Any]:
    """An episode whose model writes Markdown and HTML."""
    run = {"mask": 1, "tokens": 3, "text": "# <script>alert(1)</script>\n**bold**", "versions": [[3, 3]]}
    fed = {"mask": 0, "tokens": 2, "text": "the tool's answer"}
    return {
        "episode_id": "train/0#0",
        "reward": 1.0,
        "outcome": {"kind": "completed", "reason": "", "component": ""},
        "segments": [{"prompt": "What is 1 + 1?", "prompt_tokens": 5, "runs": [run, fed]}],
    }


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "calculator-7"
    folder.mkdir()
    return folder
