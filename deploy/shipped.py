"""Recipes and models that ship with Penstock, in a checkout and in the wheel alike: `recipes/`, and what
`recipes/index.toml` says of it.

shipped_recipes()                           one line each, for `penstock recipes`
shipped_sizes("Qwen/Qwen3-30B-A3B")         sizes of the hub's models that the recipes name, for `penstock doctor`
write_project(Path("mine"), "calculator")   a template's files under a project's names, for `penstock init`
"""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.common.registry import nearest
from penstock.deploy.recipe_tree import RECIPES, ConfigError


@dataclass(frozen=True)
class ShippedRecipe:
    """One YAML of `recipes/`."""

    file: str
    """Relative to `recipes/`."""
    about: str
    """The skill that is learned, in one line."""
    needs: str
    """Hardware: ``CPU``, or how many GPUs."""


@dataclass(frozen=True)
class Template:
    """A template of `penstock init`."""

    name: str
    about: str
    files: Mapping[str, str]
    """Name in the project → file or folder of `recipes/`."""
    replace: Mapping[str, str]
    """Text in the shipped files → text in the project's, in addition to the names of the files themselves."""


def shipped_recipes() -> list[ShippedRecipe]:
    return [ShippedRecipe(**entry) for entry in _index()["recipe"]]


def shipped_sizes(model: str) -> Mapping[str, Any] | None:
    """Return the sizes in config.json of a model that the shipped recipes name; None for any other model."""
    return next((entry["config"] for entry in _index()["model"] if model in entry["names"]), None)


def templates() -> dict[str, Template]:
    return {name: Template(name, **entry) for name, entry in _index()["template"].items()}


def _index() -> dict[str, Any]:
    with (RECIPES / "index.toml").open("rb") as file:
        return tomllib.load(file)


# projects -----------------------------------------------------------------------------------------------------------
def write_project(folder: Path, name: str) -> list[str]:
    """Writes the files of template `name` into `folder`, which is made, and returns their names in order.

    A folder that this call makes is whole or absent. Raises `ConfigError` for an unknown template, and if `folder` is
    a file or is not empty.
    """
    known = templates()
    if name not in known:
        raise ConfigError(f"--from {name}: no such template; there are {', '.join(known)}{nearest(name, known)}")
    template = known[name]
    if folder.exists():
        if not folder.is_dir() or any(folder.iterdir()):
            problem = "is not empty" if folder.is_dir() else "is a file"
            raise ConfigError(f"{folder} {problem}: give the name of a new or empty folder, nothing was written")
        return _fill(folder, template)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        project = Path(scratch) / folder.name
        project.mkdir()
        written = _fill(project, template)
        project.rename(folder)
    return written


def _fill(folder: Path, template: Template) -> list[str]:
    written = []
    for name, content in project_files(template):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        written.append(name)
    return written


def project_files(template: Template) -> Iterator[tuple[str, bytes]]:
    """Yields (name in the project, content) of each file, with the shipped paths replaced by the project's."""
    names = {f"recipes/{source}": name for name, source in template.files.items()}
    for own, shipped in template.files.items():
        module, imported = (Path(file).with_suffix("").as_posix().replace("/", ".") for file in (shipped, own))
        names |= {f"-m penstock.recipes.{module}": own, f"penstock.recipes.{module}": imported}
    changes = [*template.replace.items(), *sorted(names.items(), key=lambda pair: -len(pair[0]))]
    for name, source in _sources(template):
        if source.suffix == ".safetensors":
            yield name, source.read_bytes()
            continue
        text = source.read_text(encoding="utf-8")
        for old, new in changes:
            text = text.replace(old, new)
        yield name, text.encode()


def _sources(template: Template) -> Iterator[tuple[str, Path]]:
    """(name in the project, shipped file); a folder stands for all files in it."""
    for name, source in template.files.items():
        path = RECIPES / source
        if path.is_dir():
            inside = [one for one in sorted(path.rglob("*")) if one.is_file() and one.parent.name != "__pycache__"]
            yield from ((f"{name}/{one.relative_to(path)}", one) for one in inside)
        else:
            yield name, path
