"""The generated pages are complete, and what they name exists."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from scripts.reference import python
from scripts.reference.pages import PAGES, write
from scripts.reference.public import PUBLIC
from scripts.reference.schema_text import describe, type_text
from tests.docs.pages import text_of

COMMANDS = ("run", "doctor", "queue dead-letters requeue", "train", "train export", "data calculator", "dashboard")
SERVERS = ("Rollout server", "Sandbox server", "Dashboard", "Reward server", "Teacher server", "Search server")
ROUTES = ("generate", "episodes/{handle}/v1/chat/completions", "sessions", "run_code", "score")


def test_every_generated_page_is_written(tmp_path: Path) -> None:
    write(tmp_path)
    assert {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.md")} == PAGES.keys()
    assert "\n| `trainer.lr` | " in (tmp_path / "reference/configuration.md").read_text()


def test_every_setting_has_a_description() -> None:
    rows = [line for line in text_of("docs/reference/configuration.md").splitlines() if line.startswith("| `")]
    assert len(rows) > 200
    assert [row for row in rows if row.endswith("|  |")] == []


@pytest.mark.parametrize("dotted", [name for names in PUBLIC.values() for name in names])
def test_public_names_can_be_imported_and_are_documented(dotted: str) -> None:
    module, _, name = dotted.rpartition(".")
    if module.startswith("penstock.trainer") or module.endswith(".weights"):
        pytest.importorskip("torch")
    assert getattr(importlib.import_module(module), name).__doc__
    assert f"from {module} import {name}" in text_of("docs/reference/python.md")


def test_a_name_that_moved_is_an_error() -> None:
    with pytest.raises(LookupError, match=r"penstock\.tools has no NoSuchTool"):
        python.find("penstock.tools", "NoSuchTool")


def test_commands_servers_and_refusals_are_on_the_pages() -> None:
    cli, http = (text_of(f"docs/reference/{name}.md") for name in ("cli", "http"))
    assert [command for command in COMMANDS if f"\n## penstock {command}\n" not in cli] == []
    assert "train-rank" not in cli, "hidden commands stay hidden"
    assert tuple(section.splitlines()[0] for section in http.split("\n## ")[1:]) == SERVERS
    assert [route for route in ROUTES if f"\n### POST /{route}\n" not in http] == []
    assert "- **429** `ErrorBody`: The queue here is full: ask another server" in http
    assert "HTTPValidationError" not in http


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 5}, "integer, ≥ 1, ≤ 5"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string | null"),
        ({"type": "array", "items": {"$ref": "#/components/schemas/Chunk"}, "minItems": 1}, "[Chunk], items ≥ 1"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "{string: number}"),
        ({"enum": ["a", "b"]}, '"a" | "b"'),
        ({}, ""),
    ],
)
def test_schemas_as_words(schema: dict[str, object], text: str) -> None:
    assert type_text(schema) == text


def test_a_row_has_default_and_description_or_is_needed() -> None:
    row = describe("topk", {"type": "integer", "default": 3, "description": "Most\n  passages."}, False)
    assert row == "| `topk` | `integer` | `3` | Most passages. |"
    assert describe("queries", {"type": "array"}, True) == "| `queries` | `[any]` | *needed* |  |"
