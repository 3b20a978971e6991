"""Names for interchangeable functions: one file each, found by the name that it registers.

A function's settings are its own keyword arguments, with annotations and defaults: a recipe gives them as
``trainer.advantage_options`` and its like, and they are checked against the function.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar, cast, get_type_hints

from pydantic import ConfigDict, ValidationError, create_model

F = TypeVar("F", bound=Callable[..., object])


class UnknownName(ValueError):
    """No function of that name; the message lists the names there are and the nearest one."""


class BadOptions(ValueError):
    """A function does not take these settings; the message names the setting and what would do."""


class Registry(Generic[F]):
    """`kind` is the word for people; every module of `package` is imported before the first look-up."""

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self._package = package
        self._functions: dict[str, F] = {}

    def register(self, name: str, *, needs: Iterable[str] = (), **facts: Any) -> Callable[[F], F]:
        """`needs`: what the run must have for it, see `needs_of`; further facts become attributes of the function."""

        def add(function: F) -> F:
            vars(function).update(needs=frozenset(needs), **facts)
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
            raise UnknownName(f"unknown {self.kind} {name!r}; {_hint(name, self._functions)}")
        return self._functions[name]

    def bind(self, name: str, options: Mapping[str, Any]) -> F:
        """The function `name` with its settings filled in. Raises `UnknownName` and `BadOptions`."""
        function = self.get(name)
        return cast(F, partial(function, **checked_options(f"{self.kind} {name!r}", function, options)))

    def names(self) -> list[str]:
        self._import_all()
        return sorted(self._functions)

    def _import_all(self) -> None:
        package = importlib.import_module(self._package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self._package}.{module.name}")


def needs_of(function: Callable[..., object]) -> frozenset[str]:
    """``groups`` (two members or more), ``values`` (a critic), ``greedy`` (a greedy member of each group)."""
    return getattr(function, "needs", frozenset())


def options_of(function: Callable[..., object]) -> dict[str, Any]:
    """Setting → default."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def checked_options(what: str, function: Callable[..., object], options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` as the function's annotations want them. Raises `BadOptions`."""
    defaults = options_of(function)
    unknown = [name for name in options if name not in defaults]
    if unknown:
        raise BadOptions(f"{what} has no setting {unknown[0]!r}; {_hint(unknown[0], defaults)}")
    hints = get_type_hints(function, include_extras=True) if options else {}
    fields: dict[str, Any] = {name: (hints.get(name, Any), defaults[name]) for name in options}
    model = create_model("Options", __config__=ConfigDict(extra="forbid"), **fields)
    try:
        made = model(**options)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadOptions(f"{what}: setting {first['loc'][0]} is {first['input']!r}: {first['msg']}") from None
    return {name: getattr(made, name) for name in options}


def _hint(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    listed = f"known: {', '.join(names) or 'none'}"
    return f"did you mean {near[0]!r}? ({listed})" if near else listed
