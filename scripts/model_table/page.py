"""docs/models.md: the text around the table, and the table itself, written and read back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from scripts.model_table.families import FAMILIES

COLUMNS: Mapping[str, str] = {
    "trains": "trains",
    "publishes": "publishes",
    "lora": "LoRA",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "megatron": "`trainer.engine: megatron`",
}
CHEAP = ("trains", "publishes", "lora")
"""Columns that a default test fills anew."""
UNKNOWN = "–"
TEXT = Path(__file__).with_name("models.md")
"""The page but for its table."""


def render(cells: Mapping[str, Mapping[str, str]]) -> str:
    """`cells`: by the family's kind and column."""
    head = ["family", *COLUMNS.values()]
    lines = [_line(head), _line(["---"] * len(head))]
    for family in FAMILIES:
        found = cells.get(family.kind, {})
        lines.append(_line([family.name, *(found.get(column, UNKNOWN) for column in COLUMNS)]))
    return TEXT.read_text(encoding="utf-8").format(table="\n".join(lines))


def read_cells(page: str) -> dict[str, dict[str, str]]:
    """What `render` was given; nothing of a table with other columns."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines() if line[:1] == "|"]
    if not rows or rows[0][1:] != list(COLUMNS.values()):
        return {}
    kinds = {family.name: family.kind for family in FAMILIES}
    return {kinds[name]: dict(zip(COLUMNS, cells, strict=True)) for name, *cells in rows[2:] if name in kinds}


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
