"""Write every generated page: `python -m scripts.reference`; with `--check` only say which are stale."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scripts.reference.pages import stale, write


def main(arguments: list[str]) -> int:
    """0 where every page is current (or was written); 1 where `--check` found stale ones."""
    parser = argparse.ArgumentParser(prog="python -m scripts.reference", description=__doc__)
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="The folder of the pages.")
    parser.add_argument("--check", action="store_true", help="Write nothing; name the pages that are stale.")
    asked = parser.parse_args(arguments)
    if not asked.check:
        write(asked.docs)
        return 0
    old = stale(asked.docs)
    for name in old:
        print(f"{asked.docs / name} is stale: run python -m scripts.reference", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
