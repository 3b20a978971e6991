"""Which pages are made, and by what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from scripts.reference import command_line, configuration, http, python

PAGES: Mapping[str, Callable[[], str]] = {
    "configuration.md": configuration.render_configuration,
    "reference/cli.md": command_line.render,
    "reference/http.md": http.render,
    "reference/python.md": python.render,
}
"""Path below docs/ → the page as it should be."""


def write(docs: Path) -> None:
    for name, render in PAGES.items():
        page = docs / name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(render(), encoding="utf-8")


def stale(docs: Path) -> list[str]:
    """Names of the pages that are missing or not as they should be."""
    return [name for name, render in PAGES.items() if _text(docs / name) != render()]


def _text(page: Path) -> str | None:
    return page.read_text(encoding="utf-8") if page.is_file() else None
