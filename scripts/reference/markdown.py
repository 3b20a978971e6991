"""Text as cells of Markdown tables, which GitHub and Python-Markdown read alike."""

from __future__ import annotations

import html


def cell(text: str) -> str:
    """One line of prose."""
    return " ".join(text.replace("``", "`").split()).replace("|", "\\|")


def code(text: str) -> str:
    """Code on one line; as HTML where it holds a bar, which the two read differently within backticks."""
    line = " ".join(text.split())
    if "|" not in line:
        return f"`{line}`"
    return f"<code>{html.escape(line, quote=False).replace('|', '&#124;')}</code>"
