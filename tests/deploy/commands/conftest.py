from __future__ import annotations

from pathlib import Path

import pytest
import yaml


@pytest.fixture
def bare_run(tmp_path: Path) -> Path:
    """Folder of a run without a checkpoint and without an archive."""
    root = tmp_path / "mine"
    root.mkdir()
    tree = {"name": "mine", "model": str(tmp_path / "no-model"), "runs_dir": "..", "data": {"train": "t.jsonl"}}
    (root / "config.yaml").write_text(yaml.safe_dump(tree))
    return root
