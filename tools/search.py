"""The `search` tool: passages from a retrieval server that speaks Search-R1's shape, ours or another."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.common import bearer_headers
from penstock.sandbox import Sandbox
from penstock.tools.base import BaseTool, ToolInfraError, ToolResult
from penstock.tools.http import JsonClient

TOKEN_VARIABLE = "PENSTOCK_SEARCH_TOKEN"  # noqa: S105
"""Variable of its own: the run's token must not go to a server that is not part of the run."""


class SearchTool(BaseTool):
    """All queries of a call are one request. Pure: a worker asks a question once."""

    needs_sandbox = False
    name = "search"
    description = "Search for passages that answer a query."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    }
    aliases: Mapping[str, tuple[str, ...]] = {"query": ("query_list", "queries")}
    pure = True

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        *,
        url: str = "http://127.0.0.1:8800/retrieve",
        topk: int = 3,
        token_env: str = TOKEN_VARIABLE,
        request_timeout_s: float = 30.0,
    ) -> None:
        """
        Args:
            url: of the route, as in Search-R1 (``http://HOST:PORT/retrieve``).
            token_env: environment variable with the server's token; nothing is sent if it is not set.
            request_timeout_s: deadline of one attempt; the tool's `timeout_s` must leave room for it.
        """
        super().__init__(sandbox)
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, not {url!r}")
        self._url = url
        self._topk = topk
        token = os.environ.get(token_env)
        self._headers = bearer_headers(token or "")
        self._client = JsonClient("search", request_timeout_s)

    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> ToolResult:
        # One query or verl's `query_list`; blank ones are left out.
        value: Any = next((arguments[name] for name in ("query", *self.aliases["query"]) if name in arguments), [])
        queries = [str(query) for query in ([value] if isinstance(value, str) else value) if str(query).strip()]
        if not queries:
            return ToolResult("Error: the query is empty", is_error=True)
        body = {"queries": queries, "topk": self._topk, "return_scores": True}
        answer = await self._client.ask("POST", self._url, headers=self._headers, body=body)
        try:
            results = [[_passage(item) for item in items] for items in answer["result"]]
        except (TypeError, KeyError, AttributeError) as error:
            raise ToolInfraError("search", f"{self._url}: not Search-R1's answer: {error!r}") from error
        if len(results) != len(queries):
            raise ToolInfraError("search", f"{self._url}: {len(results)} results for {len(queries)} queries")
        return ToolResult(_render(queries, results), metrics={"searches": float(len(queries))})

    async def close(self) -> None:
        await self._client.close()


def _passage(item: Mapping[str, Any]) -> tuple[str, str]:
    """(title, text) of a document, with or without a score around it."""
    document = item.get("document", item)
    if "text" in document:
        return str(document.get("title", "")), str(document["text"])
    title, _, text = document["contents"].partition("\n")
    return title.strip('"'), text


def _render(queries: Sequence[str], results: Sequence[Sequence[tuple[str, str]]]) -> str:
    """Search-R1's way of writing passages; several queries are each headed by a line."""
    parts = []
    for query, passages in zip(queries, results, strict=True):
        heading = [f"Query: {query}"] if len(queries) > 1 else []
        docs = [f"Doc {n} (Title: {title}) {text}" for n, (title, text) in enumerate(passages, start=1)]
        parts.append("\n".join(heading + (docs or ["No passage found."])))
    return "\n\n".join(parts)
