"""Names for interchangeable functions: one file each, found by the name that it registers."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable
from typing import Generic, TypeVar

F = TypeVar("F", bound=Callable[..., object])


class UnknownName(ValueError):
    """No function of that name; the message lists the names there are and the nearest one."""


class Registry(Generic[F]):
    """`kind` is the word for people; every module of `package` is imported before the first look-up."""

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self._package = package
        self._functions: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        def add(function: F) -> F:
            self._functions[name] = function
            return function

        return add

    def get(self, name: str) -> F:
        """The function registered as `name`, or the one at a dotted path ``my_package.my_module:function``."""
        if ":" in name:
            module, _, attribute = name.partition(":")
            return getattr(importlib.import_module(module), attribute)
        self._import_all()
        if name not in self._functions:
            raise UnknownName(f"unknown {self.kind} {name!r}; {self._hint(name)}")
        return self._functions[name]

    def names(self) -> list[str]:
        self._import_all()
        return sorted(self._functions)

    def _hint(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._functions, n=1)
        known = f"known: {', '.join(sorted(self._functions))}"
        return f"did you mean {near[0]!r}? ({known})" if near else known

    def _import_all(self) -> None:
        package = importlib.import_module(self._package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self._package}.{module.name}")
