"""Keys of recipes that pages name, and YAML that they show, against the configuration itself."""

from __future__ import annotations

import re
from typing import Any, get_args

import yaml
from pydantic import BaseModel
from tests.docs.pages import ROOT

from penstock.deploy import RunConfig, parse_config
from penstock.simulator import Simulation

KEY = re.compile(r"^(agent|data|sandbox|rollout|transfer_queue|trainer|dashboard)((?:\.\w+)+)(?:[=:].*)?$")
NO_KEYS = ("sandbox.containment",)
"""Attributes that are written like keys."""
CALCULATOR = yaml.safe_load((ROOT / "recipes" / "calculator.yaml").read_text())


def unknown_key(code: str) -> str:
    """The dotted name in `code` where it is no key of a recipe or simulation, and no file of ours; else empty."""
    found = KEY.match(code)
    dotted = found[1] + found[2] if found is not None else ""
    if not dotted or dotted in NO_KEYS or dotted.endswith(".py") or _is_module(dotted):
        return ""
    return "" if any(_is_key(model, dotted.split(".")) for model in (RunConfig, Simulation)) else dotted


def _is_key(annotation: Any, names: list[str]) -> bool:
    """Below a mapping or a list anything may be."""
    candidates = (annotation, *get_args(annotation))
    if not names or any(str(one).startswith(("dict", "collections.abc.Mapping")) for one in candidates):
        return True
    model = next((one for one in candidates if _is_model(one)), None)
    field = model.model_fields.get(names[0]) if model is not None else None
    return field is not None and _is_key(field.annotation, names[1:])


def _is_model(candidate: Any) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, BaseModel)


def _is_module(dotted: str) -> bool:
    path = ROOT.joinpath(*dotted.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def check_recipe_part(text: str) -> None:
    """A part of a recipe laid over the quickstart's is a sound configuration. Raises `ConfigError`."""
    part = yaml.safe_load(text)
    assert isinstance(part, dict), "a recipe is a mapping"
    parse_config(_laid_over(CALCULATOR, part), source="the block")


def _laid_over(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return {**below, **{key: _laid_over(below.get(key), value) for key, value in above.items()}}
