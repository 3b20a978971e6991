from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from penstock.tools import (
    SearchTool,
    ToolConfig,
    ToolConfigError,
    ToolInfraError,
    ToolUnavailable,
    close_tools,
    make_tools,
)

Serve = Callable[[Any], Awaitable[str]]
ROWS = [
    {"id": "1", "title": "Paris", "text": "Capital of France."},
    {"id": "2", "title": "Berlin", "text": "Capital of Germany."},
]


@pytest_asyncio.fixture
async def server(tmp_path: Path, serve: Serve) -> str:
    pytest.importorskip("tantivy")
    from penstock.tools.retrieval import build_app, open_or_build

    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(json.dumps(row) for row in ROWS))
    return await serve(build_app(open_or_build(corpus), "s3cret"))


@pytest_asyncio.fixture
async def tool(server: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SearchTool]:
    monkeypatch.setenv("PENSTOCK_SEARCH_TOKEN", "s3cret")
    made = SearchTool(url=f"{server}/retrieve", topk=2)
    yield made
    await made.close()


async def test_search_r1s_shape_with_and_without_scores(server: str) -> None:
    async with httpx.AsyncClient(base_url=server, headers={"Authorization": "Bearer s3cret"}) as http:
        plain = (await http.post("/retrieve", json={"queries": ["france", "zzz"], "topk": 1})).json()
        assert plain["result"][1] == []
        assert plain["result"][0] == [
            {"id": "1", "title": "Paris", "text": "Capital of France.", "contents": '"Paris"\nCapital of France.'}
        ]
        scored = (await http.post("/retrieve", json={"queries": ["capital"], "return_scores": True})).json()
        assert [item["document"]["id"] for item in scored["result"][0]] == ["1", "2"]
        assert all(item["score"] > 0 for item in scored["result"][0])
        assert (await http.get("/health")).json() == {"passages": 2}
        for bad in (
            {"queries": []},
            {"queries": ["x"], "topk": 0},
            {"queries": ["x"], "k": 1},
            {"queries": ["x"] * 513},
        ):
            assert (await http.post("/retrieve", json=bad)).status_code == 422


@pytest.mark.parametrize(("method", "path"), [("POST", "/retrieve"), ("GET", "/health"), ("GET", "/docs")])
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}])
async def test_search_every_route_asks_for_the_token(
    server: str, method: str, path: str, headers: dict[str, str]
) -> None:
    async with httpx.AsyncClient(base_url=server, headers=headers) as http:
        assert (await http.request(method, path, json={"queries": ["x"]})).status_code == 401


async def test_search_sends_several_queries_in_one_request(tool: SearchTool) -> None:
    result = await tool.execute(None, {"query": "france"})
    assert result.text == "Doc 1 (Title: Paris) Capital of France."
    both = await tool.execute(None, {"query_list": ["germany", "atlantis", " "]})
    assert (
        both.text == "Query: germany\nDoc 1 (Title: Berlin) Capital of Germany.\n\nQuery: atlantis\nNo passage found."
    )
    assert both.metrics == {"searches": 2.0}
    assert (await tool.execute(None, {"query": " "})).is_error


async def test_search_tells_a_wrong_token_from_an_absent_server(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_SEARCH_TOKEN", raising=False)
    for url, error, message in [
        (f"{server}/retrieve", ToolInfraError, "HTTP 401"),
        (f"{server}/nothing", ToolInfraError, "HTTP 40"),
        ("http://127.0.0.1:9/retrieve", ToolUnavailable, "127.0.0.1:9"),
    ]:
        tool = SearchTool(url=url)
        with pytest.raises(error, match=message) as raised:
            await tool.execute(None, {"query": "x"})
        assert raised.type is error
        await tool.close()


async def test_search_retries_busy_servers_and_caches_results(serve: Serve) -> None:
    app, asked = FastAPI(), []

    @app.post("/retrieve")
    async def retrieve(request: Request) -> JSONResponse:
        asked.append(await request.json())
        if len(asked) < 3:
            return JSONResponse({}, 429, headers={"Retry-After": "0.01"})
        return JSONResponse({"result": [[{"document": {"contents": '"T"\nx'}, "score": 1.0}]]})

    tools = make_tools([ToolConfig(name="search", settings={"url": f"{await serve(app)}/retrieve"})], None)
    tool = tools["search"]
    assert tool.guard is not None
    for _ in range(2):
        assert (await tool.guard.call(tool, None, {"query": "q"})).text == "Doc 1 (Title: T) x"
    assert asked == [{"queries": ["q"], "topk": 3, "return_scores": True}] * 3
    await close_tools(tools.values())


@pytest.mark.parametrize(
    "answer", [{"result": [[]]}, {"result": [[1]] * 2}, {"results": []}, [], {"result": [[{}]] * 2}]
)
async def test_search_another_shape_is_the_services_failure(serve: Serve, answer: Any) -> None:
    app = FastAPI()

    @app.post("/retrieve")
    async def retrieve() -> JSONResponse:
        return JSONResponse(answer)

    tool = SearchTool(url=f"{await serve(app)}/retrieve")
    with pytest.raises(ToolInfraError, match="retrieve"):
        await tool.execute(None, {"query_list": ["a", "b"]})
    await tool.close()


@pytest.mark.parametrize(
    ("api", "key_header", "answer"),
    [
        ("brave", "x-subscription-token", {"web": {"results": [{"title": "T", "url": "U", "description": "D"}]}}),
        ("serper", "x-api-key", {"organic": [{"title": "T", "link": "U", "snippet": "D"}]}),
        ("tavily", "authorization", {"results": [{"title": "T", "url": "U", "content": "D"}]}),
    ],
)
async def test_search_web_search_asks_each_service_its_own_way(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, api: str, key_header: str, answer: Any
) -> None:
    app, seen = FastAPI(), []

    @app.api_route("/s", methods=["GET", "POST"])
    async def search(request: Request) -> JSONResponse:
        body = await request.body()
        seen.append((request.headers.get(key_header), request.query_params.get("q") or json.loads(body)))
        return JSONResponse(answer if len(seen) == 1 else {})

    monkeypatch.setenv("MY_KEY", "k1")
    settings = {"api": api, "url": f"{await serve(app)}/s", "key_env": "MY_KEY", "results": 2}
    (tool,) = make_tools([ToolConfig(name="web_search", settings=settings)], None).values()
    assert (await tool.execute(None, {"query": " what "})).text == "1. T\nU\nD"
    key, asked = seen[0]
    assert key in ("k1", "Bearer k1")
    assert asked == "what" or "what" in asked.values()
    assert (await tool.execute(None, {"query": "again"})).text == "No page found."
    await tool.close()


def test_search_missing_key_and_an_unknown_service_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BRAVE_API_KEY", raising=False)
    for settings, message in [({"api": "brave"}, "BRAVE_API_KEY is not set"), ({"api": "x"}, "brave, serper, tavily")]:
        with pytest.raises(ToolConfigError, match=message):
            make_tools([ToolConfig(name="web_search", settings=settings)], None)
    with pytest.raises(ToolConfigError, match="must begin with http"):
        make_tools([ToolConfig(name="search", settings={"url": "localhost:8000"})], None)
