"""Interchangeable implementations, found by name; misspelt names are answered with the nearest one.

LOSSES: Registry[Loss] = Registry("policy loss", package="penstock.trainer.losses")     modules register themselves
ENGINES: Registry[MakeEngine] = Registry("engine", {"hf": "package.module:HFEngine"})   imported on first use

@LOSSES.register("ppo")
def ppo(...): ...

LOSSES.get("ppo")        LOSSES.get("my_package.my_module:my_loss")
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Generic, TypeVar, cast, get_type_hints

F = TypeVar("F")


class UnknownName(ValueError):
    """Nothing is registered, or importable, under this name; the message has the nearest name and those known."""


class BadOptions(ValueError):
    """A function does not take these options; the message names the option and what it takes."""


class Registry(Generic[F]):
    """Name → implementation."""

    def __init__(
        self,
        kind: str,
        entries: Mapping[str, F | str] | None = None,
        *,
        package: str | None = None,
        unique: bool = False,
        error: type[Exception] = UnknownName,
        other: str = "",
    ) -> None:
        """Args:
        kind: what the entries are, as messages name it: ``policy loss``.
        entries: implementations, or their paths ``package.module:name``, which are imported when asked for.
        package: every module of it is imported before the first look-up, so that they register themselves.
        unique: a name that another implementation has is refused; else the later one replaces it.
        error: raised for unknown and refused names, with one argument, the message.
        other: what else a name may be, for that message: ``a dotted path``.
        """
        self.kind = kind
        self._entries: dict[str, F | str] = dict(entries or {})
        self._package = package
        self._imported = package is None
        self._unique = unique
        self._error = error
        self._other = other

    def register(self, name: str, **facts: Any) -> Callable[[F], F]:
        """Decorator: registers under `name`; `facts` become attributes of the entry.

        The same definition may come again (a module that is imported twice), also where names are unique.
        """

        def add(entry: F) -> F:
            known = self._entries.get(name, entry)
            first, second = (getattr(one, "__qualname__", str(one)) for one in (known, entry))
            if self._unique and first != second:
                raise self._error(f"two of kind {self.kind} are called {name!r}: {first} and {second}")
            for key, value in facts.items():
                setattr(entry, key, value)
            self._entries[name] = entry
            return entry

        return add

    def get(self, name: str, load: Callable[[str], Any] | None = None) -> F:
        """The entry `name`, or the object at a dotted path, ``package.module:name``.

        Args:
            load: finds dotted paths (a plug-in loader that knows files); None: `import_object`.

        Raises the registry's error type for unknown names and for paths that cannot be imported.
        """
        self._import_package()
        if name not in self._entries:
            if ":" in name or "." in name:
                return cast(F, load(name) if load is not None else import_object(name, error=self._error))
            raise self._error(f"unknown {self.kind} {name!r}; {near_and_known(name, self._entries, self._other)}")
        entry = self._entries[name]
        if isinstance(entry, str):
            entry = self._entries[name] = cast(F, import_object(entry, error=self._error))
        return entry

    def bind(self, name: str, options: Mapping[str, Any]) -> F:
        """The function `name` with its keyword options filled in. Raises as `get` does, and `BadOptions`."""
        function = cast(Callable[..., object], self.get(name))
        return cast(F, partial(function, **checked_options(f"{self.kind} {name!r}", function, options)))

    def names(self) -> list[str]:
        """Registered names, sorted."""
        self._import_package()
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        self._import_package()
        return name in self._entries

    def _import_package(self) -> None:
        if self._imported or self._package is None:
            return
        for module in pkgutil.iter_modules(importlib.import_module(self._package).__path__):
            importlib.import_module(f"{self._package}.{module.name}")
        self._imported = True  # last: another thread that looks up meanwhile waits for the same imports


def import_object(path: str, *, error: type[Exception] = UnknownName) -> Any:
    """The object at ``package.module:name`` or ``package.module.name``.

    Raises `error` naming the part that was not found, with the nearest name that exists.
    """
    module_name, _, name = path.rpartition(":") if ":" in path else path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as cause:
        raise error(f"{path!r}: cannot import {module_name!r}: {cause}") from cause
    if not hasattr(module, name):
        raise error(f"{path!r}: {module_name} has no {name!r}{nearest(name, vars(module))}")
    return getattr(module, name)


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Returns ``; did you mean 'x'?`` with the most similar of `known`, or an empty text. Skips dunder names."""
    words = sorted(word for word in known if not word.startswith("__"))
    close = difflib.get_close_matches(name, words, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


def near_and_known(name: str, known: Iterable[str], other: str = "") -> str:
    """``did you mean 'x'? (known: x, y)``, or ``known: x, y``; `other`, what else fits, ends the list: ``; or z``."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    listed = f"known: {', '.join(names) or 'none'}{f'; or {other}' if other else ''}"
    return f"did you mean {close[0]!r}? ({listed})" if close else listed


def options_of(function: Callable[..., object]) -> dict[str, Any]:
    """Option → default: the keyword-only parameters of `function`."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def checked_options(what: str, function: Callable[..., object], options: Mapping[str, Any]) -> dict[str, Any]:
    """`options`, validated and converted by the function's annotations. Raises `BadOptions`, which names it `what`."""
    from pydantic import ConfigDict, ValidationError, create_model

    defaults = options_of(function)
    unknown = [name for name in options if name not in defaults]
    if unknown:
        raise BadOptions(f"{what} has no setting {unknown[0]!r}; {near_and_known(unknown[0], defaults)}")
    hints = get_type_hints(function, include_extras=True) if options else {}
    fields: dict[str, Any] = {name: (hints.get(name, Any), defaults[name]) for name in options}
    model = create_model("Options", __config__=ConfigDict(extra="forbid"), **fields)
    try:
        values = model(**options)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadOptions(f"{what}: setting {first['loc'][0]} is {first['input']!r}: {first['msg']}") from None
    return {name: getattr(values, name) for name in options}


def pattern_of(name: str, patterns: Iterable[str]) -> str | None:
    """The one of `patterns` (`my_*`) that decides about `name`: `name` itself, else the first that fits; None: none."""
    patterns = list(patterns)
    if name in patterns:
        return name
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)
