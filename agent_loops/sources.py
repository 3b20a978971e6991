"""Loop, tools and limits of one data source's tasks (`agent.sources`).

An episode's services are its source's from its first line on, so that loops, tools and the gateway know of one
configuration only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.agent_loops.chat.chat import ChatTokens
from penstock.agent_loops.chat.verification import TemplateVerification, verify_template
from penstock.agent_loops.config import AgentConfig, entry_of
from penstock.agent_loops.errors import LoadError
from penstock.common import nearest
from penstock.tools import BaseTool

if TYPE_CHECKING:
    from penstock.agent_loops.base import WorkerServices


def services_of(services: WorkerServices, data_source: str) -> WorkerServices:
    """Returns the services for episodes of `data_source`."""
    config = services.config
    if not config.sources:
        return services
    tools = tools_of(config, data_source, services.tools)
    settings = {name: one for name, one in services.tool_configs.items() if name in tools}
    return replace(services, config=config.of_source(data_source), tools=tools, tool_configs=settings)


def tools_of(config: AgentConfig, data_source: str, tools: Mapping[str, BaseTool]) -> Mapping[str, BaseTool]:
    """Return the tools of the recipe that episodes of `data_source` have. Raises `LoadError` for a name none has."""
    own = entry_of(config.sources, data_source)
    if own is None or own.tools is None:
        return tools
    for name in own.tools:
        if name not in tools:
            has = f"; the recipe's tools are {', '.join(tools)}" if tools else "; the recipe has no tools"
            raise LoadError(f"agent.sources.{data_source}.tools: no tool {name!r}{nearest(name, tools) or has}")
    return {name: tool for name, tool in tools.items() if name in own.tools}


def verify_sources(chat: ChatTokens, config: AgentConfig, tools: Mapping[str, BaseTool]) -> TemplateVerification:
    """`verify_template` with every set of tools that episodes may have; that of all of them is returned.

    A role that cannot follow a reply under one set is refused under all, and begins a new segment if it does under
    all that refuse it. Raises `LoadError`, `TemplateError`.
    """
    sets = {tuple(subset): subset for subset in (tools_of(config, source, tools) for source in config.sources)}
    sets.pop(tuple(tools), None)
    others = [verify_template(chat, [tool.schema for tool in subset.values()]) for subset in sets.values()]
    verified = verify_template(chat, [tool.schema for tool in tools.values()])
    every = [*others, verified]
    chat.refused_roles = {role: why for one in every for role, why in one.unsupported.items()}
    not_renewing = {role for one in every for role in set(one.unsupported) - one.renewing}
    chat.renewing_roles = frozenset(chat.refused_roles) - not_renewing
    return verified
