"""The plain tree of a recipe: read from YAML or Python, and its paths. Nothing is checked but its form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

import penstock
from penstock.agent_loops import search_folders
from penstock.common.registry import nearest
from penstock.datasets import HARBOR
from penstock.deploy.pretrained import find_fetched
from penstock.deploy.python_recipe import BadRecipe, read_python_recipe

RECIPES = Path(penstock.__file__).parent / "recipes"
"""The recipes that ship with Penstock, in a checkout and in a wheel."""
CODE = "code"
"""Folder in a run's: copies of the Python files that its configuration names, each under its absolute path."""
_PATH_KEYS = (
    *(("model",), ("data", "train"), ("data", "eval"), ("tools",), ("sft", "policy")),
    *(("sft", "messages"), ("sft", "runs"), ("sft", "validation")),
)


class ConfigError(Exception):
    """The recipe or an override is invalid; the message may have several lines."""


def read_recipe(recipe: Path) -> dict[str, Any]:
    """Return the sections of a recipe. Raises `ConfigError`."""
    if not recipe.is_file():
        if recipe.is_dir():
            raise ConfigError(f"{recipe}: a folder, and not a run's: give the recipe's file, *.yaml or *.py")
        shipped = [str(file.relative_to(RECIPES)) for file in RECIPES.rglob("*.yaml")]
        own = [file.name for end in ("yaml", "py") for file in recipe.parent.glob(f"*.{end}")]
        hint = nearest(recipe.name, own, cutoff=0.8) or nearest(str(recipe).removeprefix("recipes/"), shipped)
        raise ConfigError(f"{recipe}: no such recipe file{hint or '; `penstock recipes` lists those that ship'}")
    if recipe.suffix == ".py":
        return _read_python(recipe)
    try:
        tree = yaml.safe_load(recipe.read_text())
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{recipe}{place}: not valid YAML: {yaml_problem(error)}") from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{recipe}: a recipe is a mapping of sections (model, data, trainer …), not {type(tree).__name__}"
        )
    return tree


def _read_python(recipe: Path) -> dict[str, Any]:
    """The tree of a Python recipe; a part of the file is the default of its key."""
    try:
        settings, parts = read_python_recipe(recipe)
    except BadRecipe as error:
        raise ConfigError(str(error)) from None
    tree: dict[str, Any] = {}
    for dotted, value in settings.items():
        known = _section(tree, dotted.split("."))
        if known and isinstance(value, dict):
            _merge(known, value)  # dotted keys and their sections may come in any order
        else:
            set_key(tree, dotted, value, f"{recipe}, SETTINGS[{dotted!r}]")
    for dotted, value in parts.items():
        *sections, leaf = dotted.split(".")
        if leaf not in _section(tree, sections):
            set_key(tree, dotted, value, f"{recipe}, default of {dotted}")
    return tree


def yaml_problem(error: yaml.YAMLError) -> str:
    """One line, without the text around the place."""
    if isinstance(error, yaml.MarkedYAMLError):
        return ": ".join(filter(None, (error.context, error.problem)))
    return str(error)


def _merge(node: dict[str, Any], section: dict[str, Any]) -> None:
    """Set the keys of `section` in `node`; sections below join those that are there."""
    for key, value in section.items():
        inner = node.get(key)
        if isinstance(inner, dict) and isinstance(value, dict):
            _merge(inner, value)
        else:
            node[key] = value


def set_key(tree: dict[str, Any], dotted: str, value: Any, source: str) -> None:
    """Set a dotted key. Raises `ConfigError` naming `source` if a section of it is a value."""
    node = tree
    *sections, leaf = dotted.split(".")
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{source}: {section!r} is a value, not a section")
    node[leaf] = value


def resolve_paths(tree: dict[str, Any], roots: Sequence[Path]) -> None:
    """Make paths absolute in place: relative to the first of `roots` below which there is such a file or folder."""
    change_paths(tree, lambda text: _resolve_path(text, roots))
    if isinstance(model := tree.get("model"), str) and (fetched := find_fetched(model)):
        tree["model"] = str(fetched)


def change_paths(tree: dict[str, Any], change: Callable[[str], str]) -> None:
    """Replace each path of the tree by what `change` makes of it."""
    for *sections, leaf in _PATH_KEYS:
        node = _section(tree, sections)
        value = node.get(leaf)
        if isinstance(value, str):
            node[leaf] = change(value)
        elif isinstance(value, list):
            node[leaf] = [change(path) if isinstance(path, str) else path for path in value]
    for holder, key in references(tree):
        value = holder.get(key)
        if isinstance(value, str) and ".py:" in value:
            holder[key] = change(value)


def references(tree: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Places for ``FILE.py:name``: loops, environments, rewards and tools. Any other name there is not a path, even if
    a folder has it."""
    agent, tools = _mapping(tree.get("agent")), tree.get("tools")
    for holder in (agent, *map(_mapping, _mapping(agent.get("sources")).values())):
        yield holder, "loop"
        yield _mapping(holder.get("settings")), "env"
    yield agent, "reward"
    sources = _mapping(_mapping(agent.get("rewards")).get("sources"))
    for key, choice in sources.items():
        yield (choice, "name") if isinstance(choice, dict) else (sources, key)
    for entry in tools if isinstance(tools, list) else ():
        yield _mapping(entry), "name"


def _section(tree: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The section that the names lead to; an empty one if the recipe lacks it."""
    for name in names:
        tree = _mapping(tree.get(name))
    return tree


def _mapping(node: Any) -> dict[str, Any]:
    """The node if it is a mapping; else an empty one, as for a section that the recipe lacks."""
    return node if isinstance(node, dict) else {}


def _resolve_path(text: str, roots: Sequence[Path]) -> str:
    """`FILE.py:name` keeps its name, `harbor:FOLDER` its kind; hub names, dotted paths, generators stay as they are."""
    if text.startswith(HARBOR):
        return HARBOR + _resolve_path(text.removeprefix(HARBOR), roots)
    file, colon, name = text.partition(":") if ".py:" in text else (text, "", "")
    for root in search_folders(text, *roots):
        if file and (root / file).exists():
            return f"{(root / file).resolve()}{colon}{name}"
        if file.startswith("/") and (copy := root / CODE / file[1:]).exists():
            return f"{copy}{colon}{name}"
    return text
