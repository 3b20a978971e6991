"""docs/architecture.md names files that are there, and tests that kill."""

from __future__ import annotations

import re

import pytest
from tests.docs.pages import INLINE, ROOT, text_of

PAGE = text_of("docs/architecture.md")
FILES = sorted({code for code in INLINE.findall(PAGE) if re.fullmatch(r"[\w.]+(/[\w.]*)+", code)})
KILLS = sorted(set(re.findall(r"`(tests/\S+\.py)`", PAGE.split("\n## Killed with SIGKILL")[1])))


@pytest.mark.parametrize("file", FILES)
def test_the_file_is_there(file: str) -> None:
    """As it stands, or in the folder that its row has named before."""
    assert (ROOT / file).exists() or list(ROOT.glob(f"*/{file}"))


@pytest.mark.parametrize("test", KILLS)
def test_the_test_kills(test: str) -> None:
    assert re.search(r"SIGKILL|\bkill", (ROOT / test).read_text())


def test_the_files_were_found() -> None:
    assert len(FILES) > 60
    assert len(KILLS) > 18
