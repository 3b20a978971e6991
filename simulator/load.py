"""Loads a checked `Simulation` from a YAML file and ``a.b=value`` overrides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from penstock.simulator.config import Simulation

NO_SETUP = "{} is a recipe; a setup has the sizes and speeds of a cluster: penstock simulate agentic-64.yaml"


class BadSetup(Exception):
    """The file, a name or an override is wrong; the message names the key and is for people."""


def of_file(path: Path) -> Simulation:
    """Raises `BadSetup`."""
    if path.suffix == ".py":
        raise BadSetup(NO_SETUP.format(path))
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise BadSetup(f"{path}: {error.strerror or error}") from None
    except yaml.YAMLError as error:
        raise BadSetup(f"{path}: not valid YAML: {error}") from None
    if isinstance(tree, dict) and "model" in tree:
        raise BadSetup(NO_SETUP.format(path))
    if not isinstance(tree, dict):
        raise BadSetup(f"{path}: a setup is a mapping of work, rollout, trainer …, not {type(tree).__name__}")
    return _checked(tree, str(path))


def changed(config: Simulation, overrides: Sequence[str]) -> Simulation:
    """Raises `BadSetup`, also for a key that does not exist."""
    tree = config.model_dump()
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise BadSetup(f"{override!r}: write it as key=value, for example rollout.servers=8")
        _set(tree, key, _value(override, text))
    return _checked(tree, " ".join(overrides))


def _value(override: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise BadSetup(f"{override!r}: the value is not valid YAML") from None


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, leaf = key.split(".")
    for section in sections:
        inner = tree.get(section)
        if not isinstance(inner, dict):
            raise BadSetup(f"{key}: unknown section {section}; known are {_sections(tree)}")
        tree = inner
    if leaf not in tree:
        raise BadSetup(f"{key}: unknown key {leaf}; known are {', '.join(tree)}")
    tree[leaf] = value


def _sections(tree: dict[str, Any]) -> str:
    return ", ".join(name for name, inner in tree.items() if isinstance(inner, dict))


def _checked(tree: dict[str, Any], source: str) -> Simulation:
    try:
        return Simulation.model_validate(tree)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc'])) or 'setup'}: {e['msg']}" for e in error.errors()]
        raise BadSetup("\n".join([f"{source}: {len(lines)} problem(s)", *lines])) from None
