"""What ships with Penstock, in a checkout and in the wheel alike: `recipes/`, and what `recipes/index.toml` says of it.

shipped_recipes()                           one line each, for `penstock recipes`
shipped_sizes("Qwen/Qwen3-30B-A3B")         sizes of the hub's models that the recipes name, for `penstock doctor`
write_project(Path("mine"), "calculator")   a template's files under a project's names, for `penstock init`
find_base_model(), make_base_model()        the calculator's model, which is in a checkout and not in the wheel
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import penstock
from penstock.common.files import FileLock
from penstock.common.registry import nearest
from penstock.deploy.config import ConfigError

FOLDER = Path(penstock.__file__).parent / "recipes"
MODEL = "model"
"""A project's folder of the base model, as its recipe names it."""
MAKER = "calculator/make_base_model.py"
MAKERS = (MAKER, "calculator/traces.py", "calculator/chat_template.jinja")
"""What the base model follows from; its name in the cache is their digest."""
MAKE_STEPS = 1500
"""Of supervised training: after 400 the model copies digits too badly for the recipe to reach its goal."""
MAKE_S = 4 * 3600.0
"""A quiet core needs ten minutes, a busy one many times that."""


@dataclass(frozen=True)
class ShippedRecipe:
    """One YAML of `recipes/`."""

    file: str
    """Relative to `recipes/`."""
    about: str
    """What is learned, in one line."""
    needs: str
    """Hardware: ``CPU``, or how many GPUs."""


@dataclass(frozen=True)
class Template:
    """What `penstock init` makes a project of."""

    name: str
    about: str
    files: Mapping[str, str]
    """Name in the project → file or folder of `recipes/`."""
    replace: Mapping[str, str]
    """Text in the shipped files → text in the project's, beside the names of the files themselves."""


def shipped_recipes() -> list[ShippedRecipe]:
    return [ShippedRecipe(**entry) for entry in _index()["recipe"]]


def shipped_sizes(model: str) -> Mapping[str, Any] | None:
    """What config.json of a model that the shipped recipes name says of its sizes; None for any other model."""
    return next((entry["config"] for entry in _index()["model"] if model in entry["names"]), None)


def templates() -> dict[str, Template]:
    return {name: Template(name, **entry) for name, entry in _index()["template"].items()}


def _index() -> dict[str, Any]:
    with (FOLDER / "index.toml").open("rb") as file:
        return tomllib.load(file)


# projects -----------------------------------------------------------------------------------------------------------
def write_project(folder: Path, name: str) -> list[str]:
    """Writes the files of template `name` into `folder`, which is made, and returns their names in order.

    A base model at hand is copied, so that the project's recipe runs at once. A folder that this call makes is whole
    or absent. Raises `ConfigError` for an unknown template, and where `folder` is a file or holds anything.
    """
    known = templates()
    if name not in known:
        raise ConfigError(f"--from {name}: no such template{nearest(name, known)}; there are {', '.join(known)}")
    template = known[name]
    if folder.exists():
        if not folder.is_dir() or any(folder.iterdir()):
            problem = "is not empty" if folder.is_dir() else "is a file"
            raise ConfigError(f"{folder} {problem}: give the name of a new or empty folder, nothing was written")
        return _fill(folder, template)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as beside:
        made = Path(beside) / folder.name
        made.mkdir()
        written = _fill(made, template)
        made.rename(folder)
    return written


def _fill(folder: Path, template: Template) -> list[str]:
    written = []
    for name, text in project_files(template):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
        written.append(name)
    if MAKER in template.files.values() and (model := find_base_model()) is not None:
        shutil.copytree(model, folder / MODEL)
        written.append(f"{MODEL}/")
    return written


def project_files(template: Template) -> Iterator[tuple[str, str]]:
    """(name in the project, text) of each file. A shipped file names others by paths that hold in `recipes/`."""
    names = {f"recipes/{source}": name for name, source in template.files.items()}
    changes = [*template.replace.items(), *sorted(names.items(), key=lambda pair: -len(pair[0]))]
    for name, source in _sources(template):
        text = source.read_text(encoding="utf-8")
        for old, new in changes:
            text = text.replace(old, new)
        yield name, text


def _sources(template: Template) -> Iterator[tuple[str, Path]]:
    """(name in the project, shipped file); a folder stands for all files in it."""
    for name, source in template.files.items():
        path = FOLDER / source
        if path.is_dir():
            inside = [one for one in sorted(path.rglob("*")) if one.is_file() and one.parent.name != "__pycache__"]
            yield from ((f"{name}/{one.relative_to(path)}", one) for one in inside)
        else:
            yield name, path


# the base model -----------------------------------------------------------------------------------------------------
def find_base_model() -> Path | None:
    """The checkout's, or one that `make_base_model` made on this machine."""
    places = (FOLDER / "calculator" / MODEL, _cached_model())
    return next((place.resolve() for place in places if (place / "model.safetensors").is_file()), None)


def make_base_model(steps: int = MAKE_STEPS) -> Path:
    """Trains the calculator's base model into this user's cache, unless there is one at hand; its progress is printed.

    Raises `ConfigError` where it cannot be made, and where another process makes it.
    """
    made = _cached_model()
    made.parent.mkdir(parents=True, exist_ok=True)
    busy = "another process makes the base model; start again when it has ended"
    with FileLock(made.with_suffix(".lock"), busy, error=ConfigError):
        return find_base_model() or _make(made, steps)


def _make(made: Path, steps: int) -> Path:
    """The folder appears whole or not at all: a maker that is killed leaves a folder of another name."""
    for left in made.parent.glob(f"{made.name}.making-*"):
        shutil.rmtree(left, ignore_errors=True)
    beside = Path(tempfile.mkdtemp(dir=made.parent, prefix=f"{made.name}.making-"))
    command = [sys.executable, str(FOLDER / MAKER), "--out", str(beside)]
    try:
        subprocess.run([*command, "--steps", str(steps)], check=True, timeout=MAKE_S)
        beside.rename(made)
    except (subprocess.SubprocessError, OSError) as error:
        raise ConfigError(f"the base model was not made: {error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return made


def _cached_model() -> Path:
    digest = sha256(b"".join((FOLDER / name).read_bytes() for name in MAKERS)).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "penstock" / f"calculator-{digest}"
