"""docs/models.md is what tiny models of each family show now."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from scripts.model_table.environments import ENVIRONMENTS, Unavailable, try_in_environment
from scripts.model_table.families import FAMILIES
from scripts.model_table.page import CHEAP, read_cells, render
from scripts.model_table.trying import try_families

pytestmark = pytest.mark.torch

PAGE = Path(__file__).parents[2] / "docs/models.md"
HINT = "run: python -m scripts.model_table"
NAMES = [family.name for family in FAMILIES]


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, str]]]:
    """(the folder of the models, the cheap cells by name)"""
    folder = tmp_path_factory.mktemp("models")
    return folder, try_families(folder)


def test_the_page_is_written_by_the_command() -> None:
    assert render(read_cells(PAGE.read_text())) == PAGE.read_text(), HINT


def test_every_cell_is_filled_and_none_is_wrong() -> None:
    page = read_cells(PAGE.read_text())
    cells = [cell for found in page.values() for cell in found.values()]
    assert len(cells) == len(FAMILIES) * (len(CHEAP) + len(ENVIRONMENTS))
    assert not [cell for cell in cells if "WRONG" in cell or "crash" in cell.lower()]
    assert not [found[column] for found in page.values() for column in CHEAP if len(found[column]) < 3]


def test_the_trainer_does_what_the_page_says(tried: tuple[Path, dict[str, dict[str, str]]]) -> None:
    """Exactness is in the cells: one that differs by more than `SAME` says so, on any CPU."""
    page = read_cells(PAGE.read_text())
    assert {name: {column: page[name][column] for column in CHEAP} for name in NAMES} == tried[1], HINT


@pytest.mark.deep
@pytest.mark.parametrize("column", ENVIRONMENTS)
def test_other_environments_do_what_the_page_says(column: str, tried: tuple[Path, dict[str, dict[str, str]]]) -> None:
    try:
        cells = try_in_environment(column, tried[0], NAMES)
    except Unavailable as error:
        if "ended" in str(error):
            raise
        pytest.skip(str(error))
    page = read_cells(PAGE.read_text())
    assert {name: page[name][column] for name in cells if len(page[name][column]) > 1} == {
        name: cell for name, cell in cells.items() if len(page[name][column]) > 1
    }, HINT
