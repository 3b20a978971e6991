"""Servers that tools ask: reached and logged in to with one question each, where asking costs nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check

QUESTION = {"query": "penstock doctor"}


def check_search(config: RunConfig) -> list[Check]:
    """Search servers of the recipe. A web search is paid for by the question and is not asked."""
    found = [entry for entry in config.tools if entry.name == "search" or entry.name.endswith(":SearchTool")]
    return asyncio.run(_ask_all([entry.settings for entry in found]))


async def _ask_all(settings: list[dict[str, Any]]) -> list[Check]:
    return [await _ask(given) for given in settings]


async def _ask(given: dict[str, Any]) -> Check:
    from penstock.tools import SearchTool, ToolInfraError

    where = str(given.get("url", "its usual address"))
    try:
        tool = SearchTool(**given)
    except (TypeError, ValueError) as error:
        return Check("search server", False, where, str(error))
    try:
        await tool.execute(None, QUESTION)
    except ToolInfraError as error:
        return Check("search server", False, error.reason, _mend(error.reason))
    finally:
        await tool.close()
    return Check("search server", True, f"{where} answers")


def _mend(reason: str) -> str:
    from penstock.tools import TOKEN_VARIABLE

    if "HTTP 401" in reason or "HTTP 403" in reason:
        return f"set {TOKEN_VARIABLE} to the token that the search server was started with"
    return "start it (`penstock search-server`), let this machine reach it, or correct url in the tool's settings"
