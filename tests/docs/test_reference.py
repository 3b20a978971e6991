"""The generated pages are current, and what they name is there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from scripts.reference import PAGES, PUBLIC, describe, main, python, stale, type_text

DOCS = Path(__file__).parents[2] / "docs"


def test_generated_pages_are_current() -> None:
    assert stale(DOCS) == [], "run: python -m scripts.reference"


def test_stale_and_missing_pages_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--docs", str(tmp_path)]) == 0
    assert main(["--docs", str(tmp_path), "--check"]) == 0
    (tmp_path / "reference/cli.md").write_text("# Command line\n")
    (tmp_path / "reference/http.md").unlink()
    assert main(["--docs", str(tmp_path), "--check"]) == 1
    said = capsys.readouterr().err
    assert [name for name in PAGES if name in said] == ["reference/cli.md", "reference/http.md"]


@pytest.mark.parametrize("dotted", [name for names in PUBLIC.values() for name in names])
def test_public_names_can_be_imported_and_are_documented(dotted: str) -> None:
    module, _, name = dotted.rpartition(".")
    if module.startswith("penstock.trainer") or module.endswith(".weights"):
        pytest.importorskip("torch")
    assert getattr(importlib.import_module(module), name).__doc__
    assert f"from {module} import {name}" in (DOCS / "reference/python.md").read_text()


def test_a_name_that_moved_is_told() -> None:
    with pytest.raises(LookupError, match=r"penstock\.tools has no NoSuchTool"):
        python.find("penstock.tools", "NoSuchTool")


def test_every_command_of_the_program_is_there() -> None:
    page = (DOCS / "reference/cli.md").read_text()
    for command in (
        "run",
        "doctor",
        "queue dead-letters requeue",
        "train",
        "train export",
        "data calculator",
        "dashboard",
    ):
        assert f"\n## penstock {command}\n" in page
    assert "train-rank" not in page, "hidden commands stay hidden"


def test_every_server_and_its_refusals_are_there() -> None:
    page = (DOCS / "reference/http.md").read_text()
    titles = [section.splitlines()[0] for section in page.split("\n## ")[1:]]
    assert titles == [
        "Rollout server",
        "Sandbox server",
        "Dashboard",
        "Reward server",
        "Teacher server",
        "Search server",
    ]
    for route in (
        "POST /generate",
        "POST /episodes/{handle}/v1/chat/completions",
        "POST /sessions",
        "POST /run_code",
        "POST /score",
    ):
        assert f"\n### {route}\n" in page
    assert "- **429** `ErrorBody`: The queue here is full: ask another server" in page
    assert "HTTPValidationError" not in page


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


def test_a_row_says_what_is_needed() -> None:
    row = describe("topk", {"type": "integer", "default": 3, "description": "Most\n  passages."}, False)
    assert row == "| `topk` | `integer` | `3` | Most passages. |"
    assert describe("queries", {"type": "array"}, True) == "| `queries` | `[any]` | *needed* |  |"
