"""A recipe in one Python file: `penstock run my_game.py`.

    SETTINGS = {"model": "…", "trainer.lr": 1e-5}     any setting, dotted or nested
    class Game: reset(seed), step(action)             agent.loop=gymnasium, agent.settings.env
    @function_tool def search(query: str): …          tools
    class Notes(BaseTool): …                          tools
    def compute_score(…): …                           agent.reward
    TASKS, EVAL_TASKS = […], […]                      data.train, data.eval; see `penstock.datasets.python_tasks`

A part becomes the default of its key; SETTINGS and the overrides of the command line come before it.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.agent_loops import LoadError, load_file
from penstock.tools import BaseTool, FunctionTool, ToolGroup

ENV = "agent.settings.env"
SEEDS = "generate:seeds/{}?train=4096&eval=64&seed=0"


class BadRecipe(ValueError):
    """The file is not a recipe; the message names what is missing or ambiguous."""


def read_python_recipe(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns SETTINGS, and (dotted key → value) of the file's parts. Raises `BadRecipe`."""
    try:
        module = load_file(file.name, file.parent)
    except LoadError as error:
        raise BadRecipe(str(error)) from error
    settings = getattr(module, "SETTINGS", None)
    if not isinstance(settings, dict):
        problem = "has no SETTINGS" if settings is None else f"SETTINGS is a {type(settings).__name__}"
        raise BadRecipe(f'{file}: {problem}; write a dict such as {{"model": "Qwen/Qwen2.5-0.5B-Instruct"}}')
    if strangers := [key for key in settings if not isinstance(key, str)]:
        raise BadRecipe(f"{file}: keys of SETTINGS are texts such as 'trainer.lr', found {strangers[0]!r}")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem)
    return copy.deepcopy(settings), {
        "name": name,
        **dict(_parts(module, file.resolve(), one_game=not _names(settings, ENV))),
    }


def _names(settings: dict[Any, Any], dotted: str) -> bool:
    """Return True if `settings` have the key, dotted or nested."""
    return dotted in settings or any(
        isinstance(inner, dict) and dotted.startswith(f"{key}.") and _names(inner, dotted.removeprefix(f"{key}."))
        for key, inner in settings.items()
    )


def _parts(module: ModuleType, file: Path, *, one_game: bool) -> Iterator[tuple[str, Any]]:
    """Yields (key, value) of each part that the module defines; imported names are not parts."""
    parts = {name: getattr(part, "function", part) for name, part in vars(module).items()}
    own = [name for name, part in parts.items() if getattr(part, "__module__", "") == module.__name__]
    makers = BaseTool | ToolGroup
    tools = [
        name
        for name in own
        if isinstance(vars(module)[name], FunctionTool)
        or (inspect.isclass(parts[name]) and issubclass(parts[name], makers) and not inspect.isabstract(parts[name]))
    ]
    classes = [name for name in own if inspect.isclass(parts[name]) and name not in tools]
    games = [name for name in classes if hasattr(parts[name], "reset") and hasattr(parts[name], "step")]
    halves = [name for name in classes if name not in games and hasattr(parts[name], "reset")]
    if halves and not games and one_game and not hasattr(module, "TASKS"):
        raise BadRecipe(f"{file}: class {halves[0]} has reset(seed) and no step(action)")
    if len(games) > 1 and one_game:
        raise BadRecipe(f"{file}: {' and '.join(games)} have reset and step; name one in SETTINGS: {ENV}")
    if games:
        yield "agent.loop", "gymnasium"
        yield ENV, f"{file}:{games[0]}"
        yield "data.train", SEEDS.format("train")
        yield "data.eval", SEEDS.format("eval")
    if tools:
        yield "tools", [{"name": f"{file}:{name}"} for name in tools]
    if "compute_score" in own:
        yield "agent.reward", f"{file}:compute_score"
    for key, name in (("data.train", "TASKS"), ("data.eval", "EVAL_TASKS")):
        if hasattr(module, name):
            yield key, f"{file}:{name}"
