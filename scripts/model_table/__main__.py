"""Write docs/models.md anew: `python -m scripts.model_table`.

Columns whose environment is not here stay as they are.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from scripts.model_table.environments import ENVIRONMENTS, Unavailable, try_in_environment
from scripts.model_table.families import FAMILIES
from scripts.model_table.page import read_cells, render
from scripts.model_table.trying import try_families


def main(arguments: list[str]) -> int:
    """0, or 1 where a cell says that something is wrong; the page is written in any case."""
    parser = argparse.ArgumentParser(prog="python -m scripts.model_table", description=__doc__)
    parser.add_argument("--page", type=Path, default=Path("docs/models.md"), help="The page.")
    parser.add_argument("--cheap", action="store_true", help="Only the columns that need no other environment.")
    asked = parser.parse_args(arguments)
    cells = read_cells(asked.page.read_text(encoding="utf-8")) if asked.page.is_file() else {}
    with tempfile.TemporaryDirectory() as models:
        for name, found in try_families(Path(models)).items():
            cells.setdefault(name, {}).update(found)
        for column in () if asked.cheap else ENVIRONMENTS:
            try:
                column_cells = try_in_environment(column, Path(models), [family.name for family in FAMILIES])
            except Unavailable as error:
                print(f"{column}: {error}", file=sys.stderr)
                continue
            for name, cell in column_cells.items():
                cells[name][column] = cell
    asked.page.write_text(render(cells), encoding="utf-8")
    wrong = [f"{name}: {cell}" for name, found in cells.items() for cell in found.values() if "WRONG" in cell]
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
