"""Pages as what can be checked: fences with their language and directive, command lines outside them, code in prose.

A directive is a comment on the line above a fence:

    <!-- shown only: why nothing runs it -->
    <!-- run by: tests/folder/test_file.py -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scripts.reference.pages import PAGES as REFERENCE

ROOT = Path(__file__).parents[2]
GENERATED = {f"docs/{name}": render for name, render in REFERENCE.items()}
"""Pages that are made when the site is built, and how."""
PAGES = sorted(
    str(file.relative_to(ROOT))
    for file in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if "reference" not in file.parts
)
RECIPE_PAGES = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "recipes").rglob("*.md"))
WITH_COMMANDS = ["AGENTS.md", *PAGES, *GENERATED, *RECIPE_PAGES]
DIRECTIVE = re.compile(r"^\s*<!-- (shown only|run by): (.+?) -->\s*$")
OPENING = re.compile(r"^( *)```(\w*)\s*$")
OURS = re.compile(r"^(\$ )?(\w+=\S+ )*(penstock|scripts/\S+|pytest|python -m penstock\S*|pip install) ?")
DRAWN = re.compile("[─│┌└►◄▼▲]")
"""A line that has one of these is a drawing."""
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True, slots=True)
class Fence:
    page: str
    line: int
    """Of its opening, from 1."""
    language: str
    text: str
    shown_only: str = ""
    """Why nothing runs it; empty: something does."""
    run_by: str = ""
    """The test file that runs it; empty: these tests."""

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """The name of the file that a block says it is, by a first line such as ``# my_agent.py``; else empty."""
        found = re.match(r"# ([\w./]+\.\w+)\b", self.text)
        return found[1] if found else ""


@cache
def text_of(page: str) -> str:
    return GENERATED[page]() if page in GENERATED else (ROOT / page).read_text(encoding="utf-8")


@cache
def fences(page: str) -> tuple[Fence, ...]:
    return tuple(_fences(page))


def _fences(page: str) -> Iterator[Fence]:
    lines = iter(enumerate(text_of(page).splitlines(), 1))
    told = ("", "")
    for number, line in lines:
        if opening := OPENING.match(line):
            inside = list(_until_closed(lines, opening[1]))
            shown, run_by = (told[1] if told[0] == kind else "" for kind in ("shown only", "run by"))
            yield Fence(page, number, opening[2], "".join(f"{one}\n" for one in inside), shown, run_by)
        directive = DIRECTIVE.match(line)
        told = (directive[1], directive[2]) if directive else ("", "")


def _until_closed(lines: Iterator[tuple[int, str]], indent: str) -> Iterator[str]:
    for _, line in lines:
        if line.strip() == "```":
            return
        yield line.removeprefix(indent)


def prose(page: str) -> str:
    """The page without its fences and comments."""
    without = re.sub(r"^( *)```.*?^ *```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"<!--.*?-->", "", without, flags=re.DOTALL)


def command_texts(page: str) -> Iterator[str]:
    """Everything on the page that a reader could type: whole bash fences, single lines elsewhere."""
    for fence in fences(page):
        if fence.shown_only:
            continue
        if fence.language == "bash":
            yield fence.text
        elif fence.language in ("", "text", "console"):
            yield from (_without_remark(line) for line in fence.text.splitlines() if _is_command(line))
    indented = (line.strip() for line in prose(page).splitlines() if line.startswith("    "))
    yield from (_without_remark(line) for line in indented if _is_command(line))


def _without_remark(line: str) -> str:
    """What stands behind a wide gap is no part of the command; ``a|b`` are names to choose from."""
    return re.sub(r"(?<=\w)\|(?=\w)", ",", re.split(r"\s{3,}", line.removeprefix("$ "))[0])


def inline_commands(page: str) -> Iterator[str]:
    """Commands of ours in the prose, as `penstock run RECIPE --dry-run`; generated pages have usage lines instead."""
    for code in () if page in GENERATED else inline_code(page):
        if re.match(r"penstock [a-z]", code) and not code.endswith("…)"):
            yield code


def inline_code(page: str) -> list[str]:
    return INLINE.findall(prose(page))


def our_code(page: str) -> list[str]:
    """Code in prose, but for first cells of tables and beginnings of items about other frameworks: their names."""
    text = prose(page)
    if page.startswith("docs/from/"):
        text = re.sub(r"^(\| .*? \| |- [*`][^:]+: )", "", text, flags=re.MULTILINE)
    return INLINE.findall(text)


def _is_command(line: str) -> bool:
    return bool(OURS.match(line)) and not DRAWN.search(line)
