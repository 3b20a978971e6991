"""Tools by name: built-in ones, those that users registered, and dotted paths."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from penstock.common import USERS_FAULTS, Registry
from penstock.common.registry import near_and_known
from penstock.sandbox import Sandbox
from penstock.tools.arguments import ArgumentSchema
from penstock.tools.base import BaseTool, ToolGroup
from penstock.tools.config import ToolConfig
from penstock.tools.episode_box import BoxTool
from penstock.tools.guard import ToolGuard
from penstock.tools.validation import check_schema

CLOSE_DEADLINE_S = 10.0
log = logging.getLogger(__name__)
FIELDS: Mapping[str, tuple[type, str]] = {
    "name": (str, "a text"),
    "description": (str, "a text"),
    "parameters": (Mapping, "a JSON schema"),
}
"""Parts of a tool that a model is shown, from its class or a `tool_schema`."""
POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)
Made = TypeVar("Made", BaseTool, ToolGroup)
T = TypeVar("T", bound=type[BaseTool] | type[ToolGroup] | BaseTool)


class ToolConfigError(ValueError):
    """A recipe names a tool that does not exist or cannot be made; the message names the entry and the fix."""


TOOLS: Registry[type[BaseTool] | type[ToolGroup] | BaseTool] = Registry(
    "tool",
    {
        "python": "penstock.tools.python:PythonTool",
        "shell": "penstock.tools.shell:ShellTool",
        "editor": "penstock.tools.editor:EditorTool",
        "final_answer": "penstock.tools.final_answer:FinalAnswerTool",
        "harbor": "penstock.tools.harbor:HarborTools",
        "mcp": "penstock.tools.mcp.tools:McpTools",
        "search": "penstock.tools.search:SearchTool",
        "swe": "penstock.tools.swe:SweTools",
        "web_search": "penstock.tools.web_search:WebSearchTool",
    },
    error=ToolConfigError,
    other="a dotted path or FILE.py:name",
)


def register_tool(name: str) -> Callable[[T], T]:
    """Decorator for a `BaseTool` subclass or a `@function_tool`: recipes can then say `name`."""

    def register(tool: T) -> T:
        TOOLS.register(name)(tool)
        return tool

    return register


def make_tools(
    configs: Sequence[ToolConfig], sandbox: Sandbox | None, load: Callable[[str], Any] | None = None
) -> dict[str, BaseTool]:
    """Name that the model calls → tool, in the order of the recipe. Raises `ToolConfigError`, and what `load` raises.

    `load` finds what users name by a path, a file's too (`penstock.agent_loops.loader`); without it they are imported.
    """
    tools: dict[str, BaseTool] = {}
    for config in configs:
        for tool in _make(config, sandbox, load):
            if tool.name in tools:
                raise ToolConfigError(f"tools: two of them are called {tool.name!r}")
            tools[tool.name] = tool
    kinds: dict[str, list[str]] = {}
    for name, tool in tools.items():
        if isinstance(tool, BoxTool):
            kinds.setdefault(tool.box_kind.__name__, []).append(name)
    if len(kinds) > 1:  # the tool that is called first would open a box that another one cannot use
        boxes = "; ".join(f"{', '.join(names)} in a {kind}" for kind, names in kinds.items())
        raise ToolConfigError(
            f"tools: an episode has one box, these would work in different ones: {boxes}. Keep one kind"
        )
    return tools


def need_sandbox(configs: Sequence[ToolConfig], load: Callable[[str], Any] | None = None) -> bool:
    """Returns whether any of the tools works in a box. Raises `ToolConfigError`, and what `load` raises."""
    return any(getattr(TOOLS.get(config.name, load), "needs_sandbox", True) for config in configs)


def configs_of(tools: Mapping[str, BaseTool]) -> dict[str, ToolConfig]:
    """The settings that `make_tools` made each tool from."""
    return {name: tool.guard.config for name, tool in tools.items() if tool.guard is not None}


async def close_tools(tools: Iterable[BaseTool]) -> None:
    """Each tool's `close`, within its deadline. Never raises: failures are logged."""
    for tool in tools:
        try:
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await tool.close()
        except USERS_FAULTS:
            log.exception("tool %s did not close", tool.name)


def _make(config: ToolConfig, sandbox: Sandbox | None, load: Callable[[str], Any] | None) -> list[BaseTool]:
    entry = TOOLS.get(config.name, load)
    try:
        tools = _instances(entry, config, sandbox)
        if config.tool_schema is not None:
            _rename(tools, config.tool_schema)
        for tool in tools:
            _check_fields(tool)
            check_schema(tool.name, tool.parameters)
            tool.guard = ToolGuard(config)
    except (TypeError, ValueError) as error:
        raise ToolConfigError(f"tool {config.name!r} with settings {config.settings}: {error}") from error
    return tools


def _instances(entry: Any, config: ToolConfig, sandbox: Sandbox | None) -> list[BaseTool]:
    if isinstance(entry, type) and issubclass(entry, ToolGroup):
        return _construct(entry, config.settings, sandbox).tools()
    if isinstance(entry, type) and issubclass(entry, BaseTool):
        _check_methods(entry)
        return [_construct(entry, config.settings, sandbox)]
    if not isinstance(entry, BaseTool):
        raise TypeError(f"it is a {type(entry).__name__}: a BaseTool subclass or a @function_tool is needed")
    if config.settings:
        raise ValueError("a @function_tool takes no settings")
    return [copy.copy(entry)]


def _check_methods(tool: type[BaseTool]) -> None:
    """Raises `TypeError` for the methods of a tool that was written for verl."""
    for method, ours in (("create", "create(self, task)"), ("execute", "execute(self, state, arguments)")):
        if "instance_id" in inspect.signature(getattr(tool, method)).parameters:
            raise TypeError(
                f"{tool.__name__}.{method} takes instance_id, as verl's tools do; here it is {ours}, and execute "
                "returns a ToolResult (docs/from/verl.md)"
            )
    if {"config", "tool_schema"} <= inspect.signature(tool).parameters.keys():
        raise TypeError(
            f"{tool.__name__}.__init__ takes config and tool_schema, as verl's tools do; here it takes the sandbox and "
            "each setting by its name (docs/from/verl.md)"
        )


def _construct(tool: Callable[..., Made], settings: Mapping[str, Any], sandbox: Sandbox | None) -> Made:
    """The tool. Its constructor's first positional parameter is the sandbox, unless it has a default other than None.

    Raises `TypeError` naming a setting that the constructor does not have.
    """
    parameters = list(inspect.signature(tool).parameters.values())
    before = [one for one in parameters[:1] if one.kind in POSITIONAL and one.default in (None, one.empty)]
    known = [one.name for one in parameters[len(before) :] if one.kind is not one.VAR_KEYWORD]
    unknown = [name for name in settings if name not in known]
    if unknown and len(known) + len(before) == len(parameters):
        raise TypeError(f"unknown setting {unknown[0]!r}; {near_and_known(unknown[0], known)}")
    return tool(*[sandbox for _ in before], **settings)


def _rename(tools: list[BaseTool], schema: Mapping[str, Any]) -> None:
    """The tool under another name, description or parameters. Raises `ValueError` if it could not be called so."""
    function = schema.get("function")
    if len(tools) != 1 or not isinstance(function, Mapping):
        raise ValueError("tool_schema is of one tool: {type: function, function: {name, description, parameters}}")
    (tool,) = tools
    if "parameters" in function:
        described = ArgumentSchema(function["parameters"])
        for name in ArgumentSchema(getattr(tool, "parameters", None)).required:
            if not any(map(described.takes, (name, *tool.aliases.get(name, ())))):
                raise ValueError(f"tool_schema: its parameters have no {name!r}, which this tool needs")
    for field in FIELDS:
        if field in function:
            value = function[field]
            setattr(tool, field, " ".join(value.split()) if isinstance(value, str) else value)


def _check_fields(tool: BaseTool) -> None:
    """Raises `TypeError` naming a field that neither the tool's class nor its `tool_schema` has."""
    for field, (kind, words) in FIELDS.items():
        if not isinstance(getattr(tool, field, None), kind):
            place = "set it in the class, or in tool_schema.function"
            raise TypeError(f"{type(tool).__name__} has no {field} ({words}): {place}")
