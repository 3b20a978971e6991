"""Agent loops by name: ``@register("my_agent")``, or any class by its path."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from penstock.agent_loops.base import AgentLoopBase
from penstock.agent_loops.errors import LoadError
from penstock.agent_loops.load import load_object, nearest

Loop = TypeVar("Loop", bound=type[AgentLoopBase])
FUNCTION_LOOP = "penstock.gateway.openai_agent:loop_of"
"""Makes a loop of an `async def agent(client, task)`. By path: the gateway is built on this folder, not the reverse."""
_LOOPS: dict[str, type[AgentLoopBase]] = {}


def register(name: str) -> Callable[[Loop], Loop]:
    """Class decorator: makes a loop known as `name`. Raises `LoadError` where another class has the name."""

    def add(loop: Loop) -> Loop:
        known = _LOOPS.get(name)
        if known is not None and known.__qualname__ != loop.__qualname__:
            raise LoadError(f"two agent loops are called {name!r}: {known.__qualname__} and {loop.__qualname__}")
        _LOOPS[name] = loop
        return loop

    return add


def find_loop(name: str, recipe_dir: Path) -> type[AgentLoopBase]:
    """The class for a registered name, ``package.module:Class`` or ``folder/file.py:Class``; an ``async def`` that
    takes (client, task) becomes an `OpenAIAgentLoop`. Raises `LoadError`.
    """
    loop = _find(name, recipe_dir)
    loop.require()
    return loop


def _find(name: str, recipe_dir: Path) -> type[AgentLoopBase]:
    import penstock.agent_loops.loops  # noqa: F401  registers the loops in the box

    if name in _LOOPS:
        return _LOOPS[name]
    if not any(mark in name for mark in ":./"):
        raise LoadError(f"no agent loop {name!r}{nearest(name, _LOOPS)} (known: {', '.join(sorted(_LOOPS))})")
    found = load_object(name, recipe_dir)
    if inspect.iscoroutinefunction(found):
        return load_object(FUNCTION_LOOP, recipe_dir)(found, name)
    if not (isinstance(found, type) and issubclass(found, AgentLoopBase)):
        raise LoadError(f"{name} is not a subclass of AgentLoopBase, nor an `async def agent(client, task)`")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise LoadError(f"{name} has no `async def {missing}`: it must be written")
    return found
