"""Explanations of a recipe's problems, from the declared keys: their descriptions, and the nearest key."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from penstock.deploy.frameworks.table import verl_hint
from penstock.deploy.removed_settings import ELSEWHERE, removed


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of a recipe, for a list."""

    key: str
    """Dotted; a section of which there are several ends in ``[]``."""
    default: str | None
    """The value as Python writes it; None: the key is required."""
    description: str


def list_settings(model: type[BaseModel], section: str = "") -> Iterator[Setting]:
    """Yields the keys of a section, then those of the sections in it."""
    nested: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        key, inner = f"{section}.{name}".lstrip("."), section_of(field.annotation)
        if inner is not None:
            nested.append((key + ("[]" if inner is not field.annotation else ""), inner))
        if inner is None or inner is not field.annotation:
            default = None if field.is_required() else repr(field.get_default(call_default_factory=True))
            yield Setting(key, default, field.description or "")
    for key, inner in nested:
        yield from list_settings(inner, key)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Returns the model class in the declared type of a key; None if there is none."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


@dataclass(frozen=True, slots=True)
class ConfigSchema:
    """The sections and keys below `root`."""

    root: type[BaseModel]

    def complaints(self, error: ValidationError, source: str, *sections: str, overrides: Sequence[str] = ()) -> str:
        """One line per problem, under one that names `source` unless overrides alone are wrong.

        Args:
            sections: where the checked part stands in the recipe.
            overrides: ``a.b=value``; the last one that a problem is of is named.
        """
        lines = []
        for problem in error.errors():
            path = [*sections, *map(str, problem["loc"])]
            key, unknown = ".".join(path), problem["type"] == "extra_forbidden"
            override = ""
            for one in overrides:
                own = f"{one.partition('=')[0]}."
                if f"{key}.".startswith(own) or (
                    unknown and own.startswith(f"{key}.")
                ):  # below it, or an unknown section
                    override = f"override {one!r}: "
            line = override + self.explain(problem, path)
            if source.endswith(".py") and line.startswith("data: is required"):
                line = (
                    "data: no tasks; define a class with reset(seed) and step(action) in this file, or TASKS, a list "
                    "of rows, and compute_score; or set data.train in SETTINGS"
                )
            lines.append(line)
        if all(line.startswith("override ") for line in lines):
            return "\n".join(lines)
        where = f"{source}, SETTINGS" if source.endswith(".py") else source
        head = f"{where}: {len(lines)} problem{'s' * (len(lines) > 1)}"
        return "\n  ".join([head, *lines])

    def explain(self, problem: ErrorDetails, path: Sequence[str]) -> str:
        """One line: the key, what is wrong, and what the key means."""
        location = [part for part in path if not part.startswith("function-")]
        dotted = ".".join(location)
        if problem["type"] == "extra_forbidden":
            sentence = removed(dotted)
            if sentence:
                return f"{dotted}: {sentence}"
            return f"{dotted}: no such key{verl_hint(dotted, problem['input']) or self._nearest(location)}"
        if problem["type"] == "missing":
            return f"{dotted}: is required. {self._description(location)}"
        if problem["type"] == "model_type":
            return f"{dotted}: is a section: write {dotted}.KEY=VALUE (got {problem['input']!r})"
        message = problem["msg"].removeprefix("Value error, ")
        if isinstance(problem["input"], dict):  # keys of a section that do not fit together, which the message names
            return f"{dotted}: {message[:1].lower()}{message[1:]}"
        return f"{dotted}: {message[:1].lower()}{message[1:]} (got {problem['input']!r}). {self._description(location)}"

    def _nearest(self, location: Sequence[str]) -> str:
        if names := difflib.get_close_matches(location[-1], ELSEWHERE, n=1, cutoff=0.85):
            return f"; did you mean {ELSEWHERE[names[0]]!r}?"
        if elsewhere := [path for path in _paths(self.root) if path.rpartition(".")[2] == location[-1]]:
            return f"; did you mean {min(elsewhere, key=lambda path: path.count('.'))!r}?"
        model = self._section(location[:-1])
        valid = list(model.model_fields) if model else []
        close = difflib.get_close_matches(location[-1], valid, n=8, cutoff=0.0) if valid else []
        if close and difflib.SequenceMatcher(None, location[-1], close[0]).ratio() >= 0.5:
            return f"; did you mean {'.'.join([*location[:-1], close[0]])!r}?"
        more = "; `penstock run RECIPE --dry-run` prints every setting" if len(valid) > len(close) else ""
        return f"; valid keys here are, the nearest first, {', '.join(close)}{more}"

    def annotation(self, dotted: str) -> Any:
        """The declared type of a key; None for an unknown one."""
        *sections, leaf = dotted.split(".")
        model = self._section(sections)
        field = model.model_fields.get(leaf) if model else None
        return field.annotation if field else None

    def _description(self, location: Sequence[str]) -> str:
        model = self._section(location[:-1])
        field = model.model_fields.get(location[-1]) if model else None
        return (field.description if field else None) or "`penstock run RECIPE --dry-run` prints every setting"

    def _section(self, location: Sequence[str]) -> type[BaseModel] | None:
        """The model class of a section, by its path; list positions are passed over."""
        model = self.root
        for name in location:
            if name.isdigit():
                continue
            inner = section_of(model.model_fields[name].annotation) if name in model.model_fields else None
            if inner is None:
                return None
            model = inner
        return model


def _paths(model: type[BaseModel]) -> Iterator[str]:
    """The dotted keys of all sections that are not in a list or mapping."""
    for name, field in model.model_fields.items():
        yield name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from (f"{name}.{inner}" for inner in _paths(field.annotation))
