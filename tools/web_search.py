"""The `web_search` tool: HTTP search APIs, each as one small adapter; the key comes from the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.common import bearer_headers
from penstock.sandbox import Sandbox
from penstock.tools.base import BaseTool, ToolInfraError, ToolResult
from penstock.tools.http import JsonClient


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """One HTTP request of a search API."""

    method: str
    headers: Mapping[str, str]
    params: Mapping[str, str] | None = None
    body: Any = None


@dataclass(frozen=True, slots=True)
class SearchApi:
    """The request of one service, and the place of its results. A further service is a further entry of `APIS`."""

    url: str
    key_env: str
    request: Callable[[str, int, str], SearchRequest]
    """(query, results, key) → request."""
    path: tuple[str, ...]
    """Keys that lead to the list of results."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names that a result has instead of `title`, `url` and `text`."""

    def results(self, answer: Any) -> list[dict[str, str]]:
        """Raises `TypeError` or `AttributeError` on an answer of another shape; a missing list means no results."""
        names = ("title", "url", "text")
        for key in self.path:
            answer = answer.get(key, {})
        return [{name: str(one.get(self.names.get(name, name), "")) for name in names} for one in answer or []]


APIS: dict[str, SearchApi] = {
    "brave": SearchApi(
        "https://api.search.brave.com/res/v1/web/search",
        "BRAVE_API_KEY",
        lambda query, count, key: SearchRequest(
            "GET", {"X-Subscription-Token": key}, params={"q": query, "count": str(count)}
        ),
        ("web", "results"),
        {"text": "description"},
    ),
    "serper": SearchApi(
        "https://google.serper.dev/search",
        "SERPER_API_KEY",
        lambda query, count, key: SearchRequest("POST", {"X-API-KEY": key}, body={"q": query, "num": count}),
        ("organic",),
        {"url": "link", "text": "snippet"},
    ),
    "tavily": SearchApi(
        "https://api.tavily.com/search",
        "TAVILY_API_KEY",
        lambda query, count, key: SearchRequest(
            "POST", bearer_headers(key), body={"query": query, "max_results": count}
        ),
        ("results",),
        {"text": "content"},
    ),
}


class WebSearchTool(BaseTool):
    """Pages for a query, from the service that the settings name; `concurrency` should be what its plan allows."""

    needs_sandbox = False
    name = "web_search"
    description = "Search the web."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    }
    pure = True

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        *,
        api: str,
        results: int = 5,
        url: str | None = None,
        key_env: str | None = None,
        request_timeout_s: float = 15.0,
    ) -> None:
        """Raises `ValueError` on an unknown service or where its key is not in the environment.

        Args:
            api: ``brave``, ``serper`` or ``tavily``.
            url, key_env: if they differ from the service's own (a proxy, another variable).
        """
        super().__init__(sandbox)
        if api not in APIS:
            raise ValueError(f"no search service {api!r}; there are: {', '.join(sorted(APIS))}")
        self._api = APIS[api]
        self._url = url or self._api.url
        self._key = os.environ.get(key_env or self._api.key_env, "")
        if not self._key:
            raise ValueError(f"{key_env or self._api.key_env} is not set: the key of the search service {api}")
        self._results = results
        self._client = JsonClient("web_search", request_timeout_s)

    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> ToolResult:
        query = arguments["query"].strip()
        if not query:
            return ToolResult("Error: the query is empty", is_error=True)
        ask = self._api.request(query, self._results, self._key)
        answer = await self._client.ask(ask.method, self._url, headers=ask.headers, params=ask.params, body=ask.body)
        try:
            results = self._api.results(answer)[: self._results]
        except (TypeError, AttributeError) as error:
            raise ToolInfraError("web_search", f"{self._url}: not the answer of this service: {error!r}") from error
        pages = [f"{n}. {one['title']}\n{one['url']}\n{one['text']}" for n, one in enumerate(results, start=1)]
        return ToolResult("\n\n".join(pages) or "No page found.", metrics={"searches": 1.0})

    async def close(self) -> None:
        await self._client.close()
