"""A small package with a history: two commits, then (the future) a fix with its tests for each of three bugs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

BASE = {
    "pyproject.toml": '[project]\nname = "wordkit"\nversion = "1.0"\n\n[tool.pytest.ini_options]\naddopts = "-x -q"\n',
    ".gitignore": "__pycache__/\n*.log\nbuild/\n!kept.log\n",
    ".gitattributes": "*.txt text eol=lf\n*.dat export-ignore\n",
    "README.md": "# wordkit\n\nWords and sums.\n",
    "data/words.txt": "windows\r\nline ends\r\n",
    "data/table.dat": "".join(map(chr, range(128))),
    "build/pinned.cfg": "tracked though ignored\n",
    "wordkit/__init__.py": "",
    "wordkit/slug.py": '''\
"""Texts as parts of an address."""

import re


def slugify(text, sep="-"):
    words = re.findall(r"[a-z0-9]+", text.lower())
    return "-".join(words)


def shorten(text, width):
    """`text` in at most `width` characters, cut between words."""
    kept = ""
    for word in text.split():
        if len(kept) + len(word) > width:
            break
        kept = f"{kept} {word}".strip()
    return kept
''',
    "wordkit/money.py": '''\
"""Sums of money as people write them."""


def parse_cents(text):
    """``1,234.50`` as 123450."""
    whole, _, part = text.replace(",", "").partition(".")
    return int(whole) * 100 + int(part or 0)


def format_cents(cents):
    return f"{cents // 100:,}.{cents % 100:02d}"
''',
    "tests/conftest.py": 'import pytest\n\n\n@pytest.fixture\ndef title():\n    return "Hello, big World"\n',
    "tests/test_slug.py": """\
from wordkit.slug import shorten, slugify


def test_slugify(title):
    assert slugify(title) == "hello-big-world"


def test_shorten_keeps_short_texts():
    assert shorten("one two", 20) == "one two"
""",
    "tests/test_money.py": """\
import unittest

from wordkit.money import format_cents, parse_cents


class MoneyTest(unittest.TestCase):
    def test_parse(self):
        self.assertEqual(parse_cents("1,234.50"), 123450)

    def test_whole(self):
        self.assertEqual(parse_cents("7"), 700)

    def test_format(self):
        self.assertEqual(format_cents(123405), "1,234.05")
""",
}
FIXES: dict[str, list[tuple[str, str, str]]] = {
    "wordkit-1": [
        ("wordkit/slug.py", 'return "-".join(words)', "return sep.join(words)"),
        (
            "tests/test_slug.py",
            "def test_shorten_keeps",
            'def test_slugify_takes_a_separator(title):\n    assert slugify(title, sep="_") == "hello_big_world"\n\n\n'
            "def test_shorten_keeps",
        ),
    ],
    "wordkit-2": [
        ("wordkit/money.py", "int(part or 0)", 'int(part.ljust(2, "0") or 0)'),
        (
            "tests/test_money.py",
            "    def test_format",
            '    def test_one_digit(self):\n        self.assertEqual(parse_cents("2.5"), 250)\n\n    def test_format',
        ),
    ],
    "wordkit-3": [
        ("wordkit/slug.py", "len(kept) + len(word) > width", "len(kept) + bool(kept) + len(word) > width"),
        (
            "tests/test_width.py",
            "",
            "import pytest\n\nfrom wordkit.slug import shorten\n\n\n"
            '@pytest.mark.parametrize("width", [7, 8, 11])\ndef test_width_holds(width):\n'
            '    assert len(shorten("abcd efgh ijk", width)) <= width\n',
        ),
    ],
}
TESTS = {
    "wordkit-1": (
        ["tests/test_slug.py::test_slugify_takes_a_separator"],
        ["tests/test_slug.py::test_slugify", "tests/test_slug.py::test_shorten_keeps_short_texts"],
    ),
    "wordkit-2": (
        ["tests/test_money.py::MoneyTest::test_one_digit"],
        [f"tests/test_money.py::MoneyTest::{name}" for name in ("test_parse", "test_whole", "test_format")],
    ),
    "wordkit-3": (
        ["tests/test_width.py::test_width_holds[8]"],
        ["tests/test_width.py::test_width_holds[7]", "tests/test_width.py::test_width_holds[11]"],
    ),
}


def make_repository(folder: Path) -> str:
    """A git repository in `folder`; returns the commit with the bugs. Later ones are on main, a branch and a tag."""
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    (folder / ".git/info/attributes").write_text("* -text\n")  # line ends that .gitattributes would not have let in
    for name in ("README.md", "wordkit/__init__.py"):
        write(folder, name, BASE[name])
    commit(folder, "first")
    for name, text in BASE.items():
        write(folder, name, text)
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("README.md")
    base = commit(folder, "words and sums")
    for name, edits in FIXES.items():
        for path, old, new in edits:
            text = (folder / path).read_text() if (folder / path).exists() else ""
            assert old in text
            write(folder, path, text.replace(old, new, 1) if old else new)
        git(folder, "tag", name, commit(folder, f"fix {name}"))
    git(folder, "branch", "release")
    git(folder, "repack", "-adq")
    return base


def rows_of(repository: Path, base: str, packages: Path | None = None) -> list[dict[str, Any]]:
    """SWE-bench's fields, as its own data is made: the fix cut into its code and its tests."""
    rows = []
    for name, (fail_to_pass, pass_to_pass) in TESTS.items():
        parts = {
            key: git(repository, "diff", "--binary", f"{name}~1", name, "--", path)
            for key, path in (("patch", "wordkit"), ("test_patch", "tests"))
        }
        rows.append(
            {
                "instance_id": name,
                "repo": "tests/wordkit",
                "repository": str(repository),
                "base_commit": base,
                "problem_statement": f"Please mend {name}.",
                "FAIL_TO_PASS": json.dumps(fail_to_pass),
                "PASS_TO_PASS": json.dumps(pass_to_pass),
                **parts,
                **({"packages": str(packages)} if packages else {}),
            }
        )
    return rows


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(text.encode())


def commit(folder: Path, message: str) -> str:
    git(folder, "add", "-A", "-f")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", message)
    return git(folder, "rev-parse", "HEAD").strip()


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=True, timeout=60)
    return done.stdout.decode("utf-8", "surrogateescape")


def patch_by(repository: Path, base: str, command: str, folder: Path) -> bytes:
    """The patch of what a shell command does to the snapshot, ignored files too."""
    git(repository, "worktree", "add", "-q", "--detach", str(folder), base)
    subprocess.run(["sh", "-ec", command], cwd=folder, check=True, timeout=60)
    git(folder, "add", "-A", "-f")
    return git(folder, "diff", "--cached", "--binary", base).encode("utf-8", "surrogateescape")
