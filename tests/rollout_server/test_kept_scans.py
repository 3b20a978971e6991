"""What transformers looks up at import is kept between processes, and never served once a file has changed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.rollout_server.kept_scans import kept

LOOK = """
import sys
import importlib.metadata
sys.modules["torch"] = None
looked = []
honest = importlib.metadata.packages_distributions
importlib.metadata.packages_distributions = lambda: looked.append(1) or honest()
from penstock.rollout_server import keep_scans
if sys.argv[1] == "kept":
    keep_scans()
from transformers import AutoTokenizer
from transformers.utils import import_utils
from pathlib import Path
models = Path(import_utils.__file__).parents[1] / "models"
found = import_utils.create_import_structure_from_path
structure = [found(models), found(str(models / "__init__.py")), found(str(models / "qwen3"))]
print(len(looked), hash(repr(sorted(import_utils.PACKAGE_DISTRIBUTION_MAPPING.items()))))
plain = lambda one: one if isinstance(one, str) else sorted(one) if not isinstance(one, dict) else sorted(
    (str(key if isinstance(key, str) else sorted(key)), plain(value)) for key, value in one.items())
print(hash(repr(plain(structure[0]))), hash(repr(plain(structure[1]))), hash(repr(plain(structure[2]))))
"""


def look(how: str, cache: Path) -> list[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONHASHSEED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOOK, how], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.split()


def test_transformers_finds_the_same(tmp_path: Path) -> None:
    plain = look("plain", tmp_path)
    first = look("kept", tmp_path)
    second = look("kept", tmp_path)
    assert (first[0], second[0]) == ("1", "0")
    assert plain[1:] == first[1:] == second[1:]
    for file in (tmp_path / "penstock").iterdir():
        assert file.stat().st_mode & 0o777 == 0o600


class Scan:
    """Counts look-ups of one folder's file."""

    def __init__(self, file: Path) -> None:
        self.file, self.times = file, 0

    def __call__(self) -> str:
        return str(kept("test", self._looked_at, self._look_up))

    def _looked_at(self) -> dict[str, list[tuple[str, int, int]]]:
        found = self.file.stat()
        return {str(self.file.parent): [(str(self.file), found.st_size, found.st_mtime_ns)]}

    def _look_up(self) -> str:
        self.times += 1
        return self.file.read_text()


@pytest.fixture
def scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scan:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "module.py"
    file.write_text("one")
    return Scan(file)


def the_file(scan: Scan) -> Path:
    (file,) = (scan.file.parent / "cache" / "penstock").iterdir()
    return file


def test_a_changed_file_is_looked_at_again(scan: Scan) -> None:
    assert [scan(), scan()] == ["one", "one"]
    assert scan.times == 1
    scan.file.write_text("two")
    os.utime(scan.file, ns=(1, 1))
    assert [scan(), scan()] == ["two", "two"]
    assert scan.times == 2
    the_file(scan)  # one file for one folder, whatever was in it


def open_to_others(file: Path) -> None:
    file.chmod(0o644)


def damaged(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def another_form(file: Path) -> None:
    file.write_bytes(b"i\x01\x00\x00\x00")


def linked(file: Path) -> None:
    file.rename(file.with_suffix(".moved"))
    file.symlink_to(file.with_suffix(".moved"))


@pytest.mark.parametrize("spoil", [open_to_others, damaged, another_form, linked])
def test_a_file_not_to_be_trusted_is_not_read(scan: Scan, spoil: Callable[[Path], None]) -> None:
    scan()
    spoil(the_file(scan))
    assert [scan(), scan()] == ["one", "one"]
    assert scan.times == 2


def test_a_folder_open_to_others_gets_no_file(scan: Scan) -> None:
    folder = scan.file.parent / "cache" / "penstock"
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    assert [scan(), scan()] == ["one", "one"]
    assert scan.times == 2
    assert not list(folder.iterdir())


def test_no_home_keeps_nothing(scan: Scan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody/.cache")
    monkeypatch.chdir(tmp_path)
    assert [scan(), scan()] == ["one", "one"]
    assert scan.times == 2
    assert not (tmp_path / "~nobody").exists()


def test_files_that_cannot_be_looked_at_keep_nothing(scan: Scan, tmp_path: Path) -> None:
    def none() -> dict[str, list[tuple[str, int, int]]]:
        raise FileNotFoundError(str(scan.file))

    assert [kept("test", none, lambda: "anew"), kept("test", none, lambda: "again")] == ["anew", "again"]
    assert not (tmp_path / "cache").exists()
