"""Imports from beside a user's file: each file gets the neighbours of its own folder, also where two folders have a
module of one name. Python knows one module by a name: without this the second folder silently gets the first one's."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

_folders: set[Path] = set()
_set_aside: dict[Path, dict[str, ModuleType]] = {}
"""Folder → its modules whose names another folder's modules have in `sys.modules`."""


def allow_imports_from(folder: Path) -> None:
    """Puts a folder at the end of the import path, once: a user's file must not shadow an installed package."""
    _folders.add(folder.resolve())
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


@contextmanager
def neighbours_of(folder: Path) -> Iterator[None]:
    """While a file of `folder` is executed: imports find its neighbours before those of other users' folders.

    What a function of it imports later is found Python's usual way, where the folder that came first has the name.
    """
    path, others = list(sys.path), _modules_hidden_by(folder)
    for name in others:
        del sys.modules[name]
    sys.modules.update(_set_aside.get(folder, {}))
    ours = [entry for entry in path if Path(entry).resolve() in _folders]
    sys.path[:] = [entry for entry in path if entry not in ours] + [str(folder)] + ours
    try:
        yield
    finally:
        sys.path[:] = path + [entry for entry in sys.path if entry not in path and entry != str(folder)]
        names = {_top(name) for name in others}
        mine = {name: module for name, module in sys.modules.items() if _top(name) in names}
        for name in mine:
            del sys.modules[name]
        _set_aside.setdefault(folder, {}).update(mine)
        sys.modules.update(others)


def _modules_hidden_by(folder: Path) -> Mapping[str, ModuleType]:
    """Loaded modules, with their submodules, of other users' folders that have a namesake in `folder`."""
    tops = {
        name
        for name, module in sys.modules.items()
        if "." not in name and _has(folder, name) and _home(module) in _folders - {folder}
    }
    return {name: module for name, module in sys.modules.items() if _top(name) in tops}


def _home(module: ModuleType) -> Path | None:
    """The folder that a top-level module or package was found in."""
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    folder = Path(file).resolve().parent
    return folder.parent if hasattr(module, "__path__") else folder


def _has(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()


def _top(name: str) -> str:
    return name.partition(".")[0]
