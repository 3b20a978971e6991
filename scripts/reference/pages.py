"""Which pages are made, and by what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from scripts.reference import command_line, configuration, http, python

PAGES: Mapping[str, Callable[[], str]] = {
    "reference/configuration.md": configuration.render_configuration,
    "reference/cli.md": command_line.render,
    "reference/http.md": http.render,
    "reference/python.md": python.render,
}
"""Path below docs/ → the page as it should be."""


def write(docs: Path) -> None:
    """Write every page below the folder `docs`."""
    for name, render in PAGES.items():
        page = docs / name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(render(), encoding="utf-8")
