"""The tree whose code is changed: product files, their tests, and copies to change."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

SUFFIXES = (".py", ".lua")
SECTION, NEEDS = re.compile(r"-- (?:script|part): ([\w-]+)"), "-- needs:"


def product_files(root: Path, globs: Iterable[str]) -> list[str]:
    """Python and Lua files that the globs match, folders included, relative to `root`.

    A glob may leave out `src/PACKAGE`; one without a match is passed over.
    """
    found: set[Path] = set()
    for glob in globs:
        bases = (base for base in (root, *root.glob("src/*/")) if any(base.glob(glob)))
        for path in next(bases, root).glob(glob):
            found.update(path.rglob("*") if path.is_dir() else [path])
    return sorted({str(file.resolve().relative_to(root)) for file in found if file.suffix in SUFFIXES})


def mirrored_folder(root: Path, path: str) -> str:
    """The deepest folder of tests that mirrors the file's: `tests/a/b` for `a/b/c.py` or `src/package/a/b/c.py`."""
    parts = Path(path).parent.parts
    parts = parts[2:] if parts[:1] == ("src",) else parts
    folders = (Path("tests", *parts[:depth]) for depth in range(len(parts), -1, -1))
    return str(next((folder for folder in folders if (root / folder).is_dir()), "tests"))


def script_names(root: Path, path: str, line: int) -> re.Pattern[str]:
    """Matches the quoted names of the Lua scripts that hold a line, or need the part that holds it.

    A file is one script or part, named like the file, or several, each below its line `-- script: NAME` or
    `-- part: NAME`. A script names its parts in a line `-- needs: PART, PART`.
    """
    folder = root / Path(path).parent
    sections = [
        (script, *section)
        for script in {*folder.glob("*.lua"), *folder.parent.glob("*.lua")}
        for section in _sections(script)
    ]
    (own,) = (name for script, lines, name, _ in sections if script == root / path and line in lines)
    names = {own, *(name for _, _, name, needs in sections if own in needs)}
    return re.compile("|".join(rf"[\"']{re.escape(name)}[\"']" for name in sorted(names)))


def _sections(script: Path) -> Iterator[tuple[range, str, set[str]]]:
    """Lines, name and needed parts of each script or part of a file."""
    lines = script.read_text().split("\n")
    heads = [(number, found[1]) for number, line in enumerate(lines, 1) if (found := SECTION.match(line))]
    starts = [(1, heads[0][1]), *heads[1:]] if heads else [(1, script.stem)]
    for (first, name), (last, _) in zip(starts, [*starts[1:], (len(lines) + 1, "")], strict=True):
        needs = (line.removeprefix(NEEDS) for line in lines[first - 1 : last - 1] if line.startswith(NEEDS))
        yield range(first, last), name, {part.strip() for line in needs for part in line.split(",")}


def tracked_files(root: Path) -> list[str]:
    """Files of the working tree that git does not ignore."""
    command = ["git", "-C", str(root), "ls-files", "-coz", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names = {name for name in listed.split("\0") if name and not name.startswith(".venv")}
    return sorted(name for name in names if (root / name).is_symlink() or (root / name).is_file())


def copy_tree(root: Path, to: Path) -> None:
    """The working tree without what git ignores; the environments are linked."""
    for name in tracked_files(root):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, to / name, follow_symlinks=False)
    for environment in root.glob(".venv*"):
        with contextlib.suppress(FileExistsError):
            (to / environment.name).symlink_to(environment.resolve())


def digest(root: Path) -> str:
    """Of all code, product and tests."""
    files = (name for name in tracked_files(root) if name.endswith(SUFFIXES) and (root / name).is_file())
    total = hashlib.sha256()
    for name in files:
        total.update(name.encode() + b"\0" + hashlib.sha256((root / name).read_bytes()).digest())
    return total.hexdigest()[:16]


class Planted:
    """A file of a copy while it holds a mistake. Entered, it is changed; left, as it was."""

    def __init__(self, path: Path, content: bytes, number: int) -> None:
        self._path, self._content, self._number = path, content, number

    def __enter__(self) -> None:
        self._original, self._times = self._path.read_bytes(), self._path.stat()
        self._path.write_bytes(self._content)
        # Python keeps compiled modules by size and second of change: each mistake of a file needs a second of its own.
        changed_ns = self._times.st_mtime_ns + self._number * 1_000_000_000
        os.utime(self._path, ns=(changed_ns, changed_ns))

    def __exit__(self, *_: object) -> None:
        self._path.write_bytes(self._original)
        os.utime(self._path, ns=(self._times.st_atime_ns, self._times.st_mtime_ns))
