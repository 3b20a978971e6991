"""Finds what a recipe names: ``package.module:Name``, ``package.module.Name`` or ``folder/file.py:Name``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from penstock.agent_loops.errors import LoadError
from penstock.agent_loops.neighbours import allow_imports_from, neighbours_of


def load_object(spec: str, recipe_dir: Path) -> Any:
    """The object that `spec` names; files are looked for beside the recipe, then in the current directory.

    Raises `LoadError` naming the part that was not found, with the nearest name that exists.
    """
    module_name, _, name = spec.rpartition(":") if ":" in spec else spec.rpartition(".")
    if not module_name or not name:
        raise LoadError(f"{spec!r} is neither package.module:Name nor folder/file.py:Name")
    is_file = module_name.endswith(".py")
    module = _load_file(module_name, recipe_dir) if is_file else _import(module_name, recipe_dir)
    if not hasattr(module, name):
        raise LoadError(f"{module_name} has no {name!r}{nearest(name, vars(module))}")
    return getattr(module, name)


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?``, or nothing."""
    close = difflib.get_close_matches(name, [word for word in known if not word.startswith("__")], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _load_file(path: str, recipe_dir: Path) -> ModuleType:
    """Loaded once per process; its folder joins the import path, so that it can import its neighbours."""
    candidates = [(folder / path).resolve() for folder in (recipe_dir, Path.cwd())]
    found = next((file for file in candidates if file.is_file()), None)
    if found is None:
        raise LoadError(f"no file {path!r}; looked at {' and '.join(str(file) for file in dict.fromkeys(candidates))}")
    module_name = f"penstock_user_{found.stem}_{xxhash.xxh3_64_hexdigest(bytes(found))[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    allow_imports_from(found.parent)
    return _execute(module_name, found)


def _execute(module_name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        with neighbours_of(file.parent):
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise LoadError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _import(module_name: str, recipe_dir: Path) -> ModuleType:
    for folder in (recipe_dir.resolve(), Path.cwd()):
        allow_imports_from(folder)
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        raise LoadError(f"module {module_name!r} cannot be imported: {type(error).__name__}: {error}") from error
