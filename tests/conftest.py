"""Which tests stay together when `scripts/test` runs two processes of them: those that share something costly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent
TOGETHER = (
    ROOT / "rollout_server" / "conformance",  # one running engine of each kind
    ROOT / "recipes" / "swe",  # tasks that are made once
    ROOT / "sandbox" / "attacks",  # one planted host, and the process's descriptors are counted around every attack
)


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = next((folder for folder in TOGETHER if folder in item.path.parents), item.path)
        item.add_marker(pytest.mark.xdist_group(str(folder.relative_to(ROOT))))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """xdist says nothing where it has not read the groups: all tests pass, and every engine is started twice."""
    if node.config.getvalue("dist") == "loadgroup" and not all("@" in one for one in ids):
        pytest.exit("xdist has not read the groups of tests: see pytest's range in pyproject.toml", returncode=4)
