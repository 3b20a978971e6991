"""Stand-in for SGLang's compiled kernel package where it has no build: every name imports, calling one raises.

A dense model on a CPU without AMX takes SGLang's native torch path and calls none. One that does need a kernel fails
with the kernel's name; there is no silent fallback.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

__version__ = "0.0.0+names.only"


class MissingKernel:
    """Something inside `sgl_kernel`: it can be imported and passed on, not called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> MissingKernel:
        return _missing(self.__name__, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{self.__name__}: SGLang's compiled kernels have no build for this machine")


class NamesOnly(types.ModuleType):
    """A submodule in which every name is a `MissingKernel`."""

    __path__ = ()  # what makes it a package

    def __getattr__(self, name: str) -> MissingKernel:
        return _missing(self.__name__, name)


class SubmoduleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any submodule of this package."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Of `sgl_kernel.…`; None for every other module."""
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """An empty module of names."""
        return NamesOnly(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Mark it as what it is."""
        module.__version__ = __version__  # type: ignore[attr-defined]


def _missing(parent: str, name: str) -> MissingKernel:
    if name.startswith("__"):
        raise AttributeError(name)
    return MissingKernel(f"{parent}.{name}")


def __getattr__(name: str) -> MissingKernel:
    return _missing(__name__, name)


sys.meta_path.append(SubmoduleFinder())
