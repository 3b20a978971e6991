"""A server of streamed answers, as a rollout server sends them: prints its URL and serves until stdin ends."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock.common import HttpServer, listen

TOKENS_PER_LINE = 16


async def _lines(count: int) -> AsyncIterator[str]:
    chunk = {"token_ids": list(range(1000, 1000 + TOKENS_PER_LINE)), "logprobs": [-1.25] * TOKENS_PER_LINE}
    line = json.dumps(chunk) + "\n"
    for _ in range(count):
        yield line
        await asyncio.sleep(0)  # each line is its own write, as tokens arrive


async def stream(request: Request) -> Response:
    return StreamingResponse(_lines((await request.json())["lines"]), media_type="application/x-ndjson")


async def call(request: Request) -> Response:
    return JSONResponse({"received": len(await request.body())})


async def main() -> None:
    routes = [Route("/stream", stream, methods=["POST"]), Route("/call", call, methods=["POST"])]
    async with HttpServer(Starlette(routes=routes), listen("127.0.0.1", 0)) as server:
        print(server.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
