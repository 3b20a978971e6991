"""docs/models.md: the text around the table, and the table itself, written and read back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from scripts.model_table.families import FAMILIES

COLUMNS: Mapping[str, str] = {
    "trains": "rows",
    "publishes": "published",
    "lora": "LoRA",
    "experts": "experts over ranks",
    "context": "tokens over ranks",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "megatron": "megatron",
}
CHEAP = ("trains", "publishes", "lora", "experts", "context")
"""Columns that a default test fills anew."""
UNKNOWN = "–"
TEXT = Path(__file__).with_name("models.md")
"""The page but for its table."""
WIDTH = 100
WHOLE_WORDS: Mapping[str, Any] = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
NOTE = re.compile(r"^- \[(\d+)\] (.*(?:\n  .*)*)", re.MULTILINE)
CITED = re.compile(r" \[(\d+)\]$")


def render(cells: Mapping[str, Mapping[str, str]]) -> str:
    """`cells`: by the family's name and column. What follows a colon becomes a numbered note below the table."""
    head = ["family", *COLUMNS.values()]
    lines, notes = [_line(head), _line(["---"] * len(head))], dict[str, int]()
    for family in FAMILIES:
        row = cells.get(family.name, {})
        texts = [row.get(column, UNKNOWN).partition(": ") for column in COLUMNS]
        short = [text + (f" [{notes.setdefault(note, len(notes) + 1)}]" if note else "") for text, _, note in texts]
        lines.append(_line([family.name, *short]))
    wrapped = [fill(f"- [{number}] {note}", WIDTH, **WHOLE_WORDS) for note, number in notes.items()]
    return TEXT.read_text(encoding="utf-8").format(table="\n".join(lines), notes="\n".join(wrapped))


def read_cells(page: str) -> dict[str, dict[str, str]]:
    """What `render` was given; nothing of a table with other columns."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines() if line[:1] == "|"]
    if not rows or rows[0][1:] != list(COLUMNS.values()):
        return {}
    notes = {number: " ".join(note.split()) for number, note in NOTE.findall(page)}
    names = {family.name for family in FAMILIES}
    whole = {name: [CITED.sub(lambda cited: f": {notes[cited[1]]}", cell) for cell in cells] for name, *cells in rows}
    return {name: dict(zip(COLUMNS, cells, strict=True)) for name, cells in whole.items() if name in names}


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
