"""`penstock search-server`: a corpus over HTTP, in Search-R1's shape.

    POST /retrieve  {"queries": [...], "topk": 3, "return_scores": false}  → {"result": [[DOCUMENT, …], …]}
                    with "return_scores": true                             → {"result": [[{"document", "score"}, …], …]}
    GET  /health                                                           → {"passages"}

A DOCUMENT has `id`, `title`, `text` and `contents` (the title in quotes, a line break, the text). Every route needs
``Authorization: Bearer TOKEN``.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from penstock.common import LimitBody, RequireToken, add_error_handlers, listen
from penstock.common import serve as serve_http
from penstock.tools.retrieval.corpus import Hit, Index
from penstock.tools.retrieval.folder import IndexFailed

logger = logging.getLogger(__name__)


class RetrieveRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    queries: list[str] = Field(min_length=1, max_length=512)
    topk: int | None = Field(None, ge=1, le=100)
    return_scores: bool = False


def build_app(index: Index, token: str, topk: int = 3) -> FastAPI:
    """The server as an ASGI app; `topk` where a request names none. Raises `ValueError` on an empty token."""
    if not token:
        raise ValueError("the search server needs a token")
    # Batches on threads at one moment: further ones wait in line, so that a burst does not starve the accepting loop.
    turns = asyncio.Semaphore(8)
    app = FastAPI(openapi_url=None)
    app.add_middleware(LimitBody)
    app.add_middleware(RequireToken, authorize=token)
    add_error_handlers(app)

    @app.post("/retrieve")
    async def retrieve(body: RetrieveRequest) -> dict[str, Any]:
        """The best passages of each query, in Search-R1's shape."""
        queries = [query[:20_000] for query in body.queries]
        async with turns:
            results = await asyncio.to_thread(index.search_all, queries, body.topk or topk)
        return {"result": [[_to_json(hit, body.return_scores) for hit in hits] for hits in results]}

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Return the number of passages."""
        return {"passages": len(index)}

    return app


def _to_json(hit: Hit, with_score: bool) -> dict[str, Any]:
    document = hit.passage.to_document()
    return {"document": document, "score": hit.score} if with_score else document


async def serve(index: Index, host: str, port: int, token: str, topk: int = 3) -> None:
    """Serves until cancelled or stopped by SIGTERM. Raises `IndexFailed` where the port is taken."""
    try:
        listener = listen(host, port)
    except OSError as error:
        raise IndexFailed(str(error.strerror)) from error
    app = build_app(index, token, topk)
    await serve_http(app, listener, on_ready=lambda url: logger.info("%d passages on %s/retrieve", len(index), url))
