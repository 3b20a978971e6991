"""What docs/architecture.md and docs/guide/operations.md name exists."""

from __future__ import annotations

import re
from functools import cache

import pytest
from tests.docs.pages import INLINE, ROOT, text_of

ARCHITECTURE = text_of("docs/architecture.md")
FILES = sorted({code for code in INLINE.findall(ARCHITECTURE) if re.fullmatch(r"[\w.]+(/[\w.]*)+", code)})
KILLS = sorted(set(re.findall(r"`(tests/\S+\.py)`", ARCHITECTURE.split("\n## Tests that kill processes")[1])))
FOLDERS = "agent_loops common deploy gateway rollout_server sandbox tools trainer transfer_queue weight_sync".split()  # noqa: SIM905


@cache
def program() -> str:
    return "\n".join(file.read_text() for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))


def first_cells(heading: str) -> list[str]:
    """Code in the bold beginnings of the list under a heading of docs/guide/operations.md."""
    section = text_of("docs/guide/operations.md").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    beginnings = re.findall(r"^- \*\*(.+?)\*\*: ", section.replace("\n  ", " "), re.MULTILINE)
    return [code for beginning in beginnings for code in re.findall(r"`([^`]+)`", beginning)]


MESSAGES = first_cells("When it fails")
NUMBERS = [code for code in first_cells("Tuning, by what you see") if "penstock " not in code]


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_the_architecture_exists(file: str) -> None:
    """As it stands, or in the folder that its row has named before."""
    assert (ROOT / file).exists() or list(ROOT.glob(f"*/{file}"))


@pytest.mark.parametrize("test", KILLS)
def test_a_test_of_kills_kills(test: str) -> None:
    assert re.search(r"SIGKILL|\bkill", (ROOT / test).read_text())


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_one_of_ours(message: str) -> None:
    assert message in program()


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_one_that_we_write(name: str) -> None:
    assert re.search(rf"\b{re.escape(name.rpartition(':')[2])}\b", program())


def test_the_tables_are_read() -> None:
    assert (len(FILES) > 60, len(KILLS) > 18, len(MESSAGES) > 12) == (True, True, True)
    assert "agent:admission" in NUMBERS
