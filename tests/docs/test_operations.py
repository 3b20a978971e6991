"""docs/operations.md names messages that the program prints, and numbers that it writes."""

from __future__ import annotations

import re
from functools import cache

import pytest
from tests.docs.pages import ROOT, text_of

FOLDERS = (
    *("agent_loops", "common", "deploy", "gateway", "rollout_server", "sandbox", "tools", "trainer"),
    *("transfer_queue", "weight_sync"),
)


@cache
def program() -> str:
    return "\n".join(file.read_text() for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))


def first_cells(heading: str) -> list[str]:
    """Code in the first column of the table under a heading."""
    section = text_of("docs/operations.md").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| ")]
    return [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("message", first_cells("When it fails"))
def test_the_message_is_one_of_ours(message: str) -> None:
    assert message in program()


@pytest.mark.parametrize("name", [code for code in first_cells("Tuning, by what you see") if "penstock " not in code])
def test_the_number_is_one_that_we_write(name: str) -> None:
    assert re.search(rf"\b{re.escape(name.rpartition(':')[2])}\b", program())


def test_the_tables_were_found() -> None:
    assert len(first_cells("When it fails")) > 12
    assert "agent:admission" in first_cells("Tuning, by what you see")
