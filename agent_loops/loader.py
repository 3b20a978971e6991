"""Resolves names in a recipe: ``package.module:Name``, ``package.module.Name`` or ``folder/file.py:Name``.

Import isolation: each user file imports modules from its own folder, even if two folders have a module of the same
name. Python keeps one module per name; without isolation the second folder would silently get the first one's module.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

import penstock
from penstock.agent_loops.errors import LoadError
from penstock.common import USERS_FAULTS, nearest

_folders: set[Path] = set()
_loading = threading.RLock()
"""Held while a module is executed: checks run in threads, and another one would be given half a module."""
_set_aside: dict[Path, dict[str, ModuleType]] = {}
"""Folder → its modules whose names another folder's modules have in `sys.modules`."""


def load_object(spec: str, recipe_dir: Path) -> Any:
    """Return the object that `spec` names; files are searched in the recipe's folder, then in the current one.

    Raises `LoadError` naming the part that was not found, with the nearest name that exists.
    """
    module_name, _, name = spec.rpartition(":") if ":" in spec else spec.rpartition(".")
    if spec.endswith(".py"):
        raise LoadError(f"{spec}: name what to take from this file, as {spec}:NAME")
    if not module_name or not name:
        raise LoadError(f"{spec!r} is neither package.module:Name nor folder/file.py:Name")
    is_file = module_name.endswith(".py")
    with _loading:
        module = load_file(module_name, recipe_dir) if is_file else _import(module_name, recipe_dir)
    if not hasattr(module, name):
        own = [one for one, part in vars(module).items() if getattr(part, "__module__", "") == module.__name__]
        offered = f"; it has {', '.join(own)}" if own else ""
        raise LoadError(f"{module_name} has no {name!r}{nearest(name, dir(module)) or offered}")
    return getattr(module, name)


def search_folders(path: str, *folders: Path) -> tuple[Path, ...]:
    """Return the folders in which to look for a relative path: `folders`, then Penstock's own for ``recipes/…``."""
    return (*folders, Path(penstock.__file__).parent) if path.startswith("recipes/") else folders


def load_file(path: str, recipe_dir: Path) -> ModuleType:
    """Load a file once per process. Its folder joins the import path, so that it can import modules of that folder.

    The file is searched in the folder of the recipe, in the current directory and, if it is one of ``recipes/``, in
    Penstock itself. Raises `LoadError`.
    """
    candidates = [(folder / path).resolve() for folder in search_folders(path, recipe_dir, Path.cwd())]
    path_of_file = next((file for file in candidates if file.is_file()), None)
    if path_of_file is None:
        raise LoadError(f"no file {path!r}; looked at {' and '.join(str(file) for file in dict.fromkeys(candidates))}")
    module_name = f"penstock_user_{path_of_file.stem}_{xxhash.xxh3_64_hexdigest(bytes(path_of_file))[:8]}"
    with _loading:
        if module_name in sys.modules:
            return sys.modules[module_name]
        allow_imports_from(path_of_file.parent)
        return _execute(module_name, path_of_file)


def _execute(module_name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        with isolated_imports(file.parent):
            spec.loader.exec_module(module)
    except USERS_FAULTS as error:
        del sys.modules[module_name]
        raise LoadError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _import(module_name: str, recipe_dir: Path) -> ModuleType:
    for folder in (recipe_dir.resolve(), Path.cwd()):
        allow_imports_from(folder)
    try:
        return importlib.import_module(module_name)
    except USERS_FAULTS as error:
        raise LoadError(f"module {module_name!r} cannot be imported: {type(error).__name__}: {error}") from error


def allow_imports_from(folder: Path) -> None:
    """Appends a folder to the import path, once: at the end, so that no installed package is shadowed."""
    _folders.add(folder.resolve())
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


@contextmanager
def isolated_imports(folder: Path) -> Iterator[None]:
    """While a file of `folder` is executed, imports find modules of its folder before those of other users' folders.

    Imports inside functions that run later use Python's usual order: the first folder that has the name.
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
        mine = {name: module for name, module in sys.modules.copy().items() if _top(name) in names}
        for name in mine:
            del sys.modules[name]
        _set_aside.setdefault(folder, {}).update(mine)
        sys.modules.update(others)


def _modules_hidden_by(folder: Path) -> Mapping[str, ModuleType]:
    """Loaded modules, with their submodules, of other users' folders that have a namesake in `folder`."""
    loaded = sys.modules.copy()  # another thread may import meanwhile
    tops = {
        name
        for name, module in loaded.items()
        if "." not in name
        and ((folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file())
        and _home(module) in _folders - {folder}
    }
    return {name: module for name, module in loaded.items() if _top(name) in tops}


def _home(module: ModuleType) -> Path | None:
    """The folder that a top-level module or package was found in."""
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    folder = Path(file).resolve().parent
    return folder.parent if hasattr(module, "__path__") else folder


def _top(name: str) -> str:
    return name.partition(".")[0]
