"""`penstock search-server`: a corpus over HTTP, in Search-R1's shape.

    POST /retrieve  {"queries": [...], "topk": 3, "return_scores": false}  → {"result": [[DOCUMENT, …], …]}
                    with "return_scores": true                             → {"result": [[{"document", "score"}, …], …]}
    GET  /health                                                           → {"passages"}

A DOCUMENT has `id`, `title`, `text` and `contents` (the title in quotes, a line break, the text). Every route needs
``Authorization: Bearer TOKEN``.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field

from penstock.tools.retrieval.corpus import Hit, Index
from penstock.tools.retrieval.folder import IndexFailed

MAX_QUERIES = 512
MAX_TOPK = 100
MAX_QUERY_CHARS = 20_000
SEARCHES_AT_ONCE = 8
"""Batches on threads at one moment; further ones wait in line, so that a burst does not starve the accepting loop."""
logger = logging.getLogger(__name__)


class RetrieveRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    queries: list[str] = Field(min_length=1, max_length=MAX_QUERIES)
    topk: int | None = Field(None, ge=1, le=MAX_TOPK)
    return_scores: bool = False


def build_app(index: Index, token: str, topk: int = 3) -> FastAPI:
    """The server as an ASGI app; `topk` where a request names none. Raises `ValueError` on an empty token."""
    if not token:
        raise ValueError("the search server needs a token")
    turns = asyncio.Semaphore(SEARCHES_AT_ONCE)
    # without an openapi_url there are no pages about the routes, which would not ask for the token
    app = FastAPI(dependencies=[Depends(_authorize(token))], openapi_url=None)

    @app.post("/retrieve")
    async def retrieve(body: RetrieveRequest) -> dict[str, Any]:
        """The best passages of each query, in Search-R1's shape."""
        queries = [query[:MAX_QUERY_CHARS] for query in body.queries]
        async with turns:
            found = await asyncio.to_thread(index.search_all, queries, body.topk or topk)
        return {"result": [[_to_json(hit, body.return_scores) for hit in hits] for hits in found]}

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """How many passages there are."""
        return {"passages": len(index)}

    return app


def _to_json(hit: Hit, with_score: bool) -> dict[str, Any]:
    document = hit.passage.to_document()
    return {"document": document, "score": hit.score} if with_score else document


def _authorize(token: str) -> Any:
    expected = f"Bearer {token}".encode()

    async def check(request: Request) -> None:
        given = request.headers.get("authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, expected):
            raise HTTPException(401, "a bearer token is needed", headers={"WWW-Authenticate": "Bearer"})

    return check


async def serve(index: Index, host: str, port: int, token: str, topk: int = 3) -> None:
    """Until cancelled or told by SIGTERM. Raises `IndexFailed` where the port is taken."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise IndexFailed(f"port {port} on {host} is in use or not ours: {error.strerror}; choose another") from error
    server = uvicorn.Server(uvicorn.Config(build_app(index, token, topk), log_level="warning"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    logger.info("%d passages on http://%s:%d/retrieve", len(index), host, listener.getsockname()[1])
    try:
        await asyncio.shield(task)
    finally:
        server.should_exit = True
        await task
        listener.close()
