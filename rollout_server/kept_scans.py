"""What transformers looks up on the disk when it is imported, kept from one process to the next.

    packages     `importlib.metadata.packages_distributions()`: the lists of files of all that is installed
    structure    what each of the 2,400 files of its models exports, read line by line

Together they are half of the CPU time of `import transformers` without torch, in every process of a run. Each result is
a file of this user's alone, with the path, size and time of change of all that was looked at, as Python keeps bytecode:
a package that is installed, removed or edited makes it invalid. Where no such file can be had, it is looked up anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import marshal
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.common import private_folder, write_atomically

MODULE = "transformers.utils.import_utils"
"""The module that looks."""
METADATA = (".dist-info", ".egg-info")
_FORMAT = f"1 {sys.implementation.cache_tag}"


def keep_scans() -> None:
    """Before this process's first import of transformers; further calls do nothing."""
    if not any(isinstance(finder, ScanFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, ScanFinder())


class ScanFinder(MetaPathFinder):
    """Finds `MODULE` where Python does, and has it use what is kept."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        spec.loader = ScanLoader(name, spec.loader.path)
        return spec


class ScanLoader(SourceFileLoader):
    """Runs the module with both look-ups replaced."""

    def exec_module(self, module: ModuleType) -> None:
        look_up = importlib.metadata.packages_distributions
        importlib.metadata.packages_distributions = lambda: kept("packages", installed, look_up)
        try:
            super().exec_module(module)
        finally:
            importlib.metadata.packages_distributions = look_up
        scan = getattr(module, "create_import_structure_from_path", None)
        if scan is not None:
            models = Path(self.path).parents[1] / "models"
            vars(module)["create_import_structure_from_path"] = _kept_scan(scan, models)


def _kept_scan(scan: Callable[[Any], Any], models: Path) -> Callable[[Any], Any]:
    @lru_cache
    def create_import_structure_from_path(module_path: Any) -> Any:
        if Path(module_path) not in (models, models / "__init__.py"):
            return scan(module_path)
        return kept("structure", lambda: {str(models): files_below(models)}, lambda: scan(module_path))

    return create_import_structure_from_path


SeenFile = tuple[str, int, int]
"""Path, size, time of change in nanoseconds."""


def kept(name: str, looked_at: Callable[[], Mapping[str, Iterable[SeenFile]]], look_up: Callable[[], Any]) -> Any:
    """The result of `look_up()`, from an earlier process where `looked_at()` (folder → its files) is the same."""
    try:
        # Before the look-up: what changes during it makes the result invalid, never the other way round.
        seen = [[folder, sorted(files)] for folder, files in looked_at().items()]
    except OSError:  # a file that is being exchanged, or a link to nothing
        return look_up()
    key, folders = [_FORMAT, seen], [folder for folder, _ in seen]
    file = cache_folder() / f"{name}-{hashlib.sha256(repr(folders).encode()).hexdigest()[:16]}.marshal"
    with contextlib.suppress(OSError, ValueError, EOFError, TypeError):
        found, result = marshal.loads(read_own(file))  # noqa: S302 - a file that only this user can write
        if found == key:
            return result
    result = look_up()
    with contextlib.suppress(OSError, ValueError):  # a full disk, a folder that is open to others
        if file.is_absolute():  # else this user has no home
            private_folder(file.parent)
            write_atomically(file, marshal.dumps((key, result)), mode=0o600)
    return result


def cache_folder() -> Path:
    """Of this user; no absolute path where there is no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "penstock"


def read_own(path: Path) -> bytes:
    """Raises `OSError`, also where another user could have written it: then it is not read."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{path} is not this user's alone")
        return file.read()


def installed() -> dict[str, list[SeenFile]]:
    """Of each folder in which Python finds distributions, in its order, the files that describe them. Raises
    `OSError`."""
    found: dict[str, list[SeenFile]] = {}
    for folder in dict.fromkeys(sys.path):
        files = [_seen(folder, os.stat(folder))] if os.path.isfile(folder) else list(_metadata_in(folder or "."))
        if files:
            found[folder] = files
    return found


def _metadata_in(folder: str) -> Iterator[SeenFile]:
    """None where the folder cannot be listed: Python finds nothing there either. Raises `OSError`."""
    try:
        with os.scandir(folder) as listed:
            entries = list(listed)
    except OSError:
        return
    for entry in entries:
        if entry.name.endswith(METADATA):
            yield from files_below(entry.path) if entry.is_dir() else [_seen(entry.path, entry.stat())]


def files_below(folder: Path | str) -> Iterator[SeenFile]:
    """Without bytecode, whose times say nothing of the source's. Raises `OSError`."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == "__pycache__":
                continue
            if entry.is_dir():
                yield from files_below(entry.path)
            else:
                yield _seen(entry.path, entry.stat())


def _seen(path: str, found: os.stat_result) -> SeenFile:
    return path, found.st_size, found.st_mtime_ns
