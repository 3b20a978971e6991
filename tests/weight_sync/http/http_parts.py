"""What stands between a trainer that serves weights and a server that fetches them, misbehaving on order."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from tests.weight_sync.conftest import small_tensors

PIECE_BYTES = 4096


class CuttingProxy:
    """Hands connections on to `target`; the first of them only for as many bytes of body as `cuts` says."""

    def __init__(self, target: str, cuts: list[int]) -> None:
        self._target = urlsplit(target)
        self._cuts = cuts
        self.ranges: list[int] = []
        """Where each request asked to begin."""
        self.url = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if found := re.search(rb"Range: bytes=(\d+)-", request):
            self.ranges.append(int(found[1]))
        answer, asking = await asyncio.open_connection(self._target.hostname, self._target.port)
        asking.write(request)
        writer.write(await answer.readuntil(b"\r\n\r\n"))
        left = self._cuts.pop(0) if self._cuts else 1 << 60
        while left and (piece := await answer.read(min(left, PIECE_BYTES))):
            left -= len(piece)
            writer.write(piece)
            await writer.drain()
        asking.close()
        writer.close()


@asynccontextmanager
async def cutting_proxy(target: str, *cuts: int) -> AsyncIterator[CuttingProxy]:
    proxy = CuttingProxy(target, list(cuts))
    server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()


Reply = Callable[[web.Request, Path], web.StreamResponse | Awaitable[web.StreamResponse]]
TRAINER, PEER = "127.0.0.1", "127.0.0.2"


def whole(_request: web.Request, file: Path) -> web.StreamResponse:
    return web.FileResponse(file)


def says(status: int, text: str = "", **headers: str) -> Reply:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda _request, _file: web.Response(status=status, text=text, headers=headers)


def names(peer: str) -> Reply:
    """Another server has the file."""
    return lambda request, _file: web.Response(status=303, headers={"Location": f"http://{peer}:{request.url.port}"})


def promising(request: web.Request, file: Path) -> dict[str, str]:
    """The headers of an answer from the byte that was asked for."""
    size = file.stat().st_size
    return {"Content-Range": f"bytes {begin_of(request)}-{size - 1}/{size}"}


def begin_of(request: web.Request) -> int:
    return int(request.headers["Range"].removeprefix("bytes=").removesuffix("-"))


async def one_mib(request: web.Request, file: Path) -> web.StreamResponse:
    """And the connection ends."""
    answer = web.StreamResponse(status=206, headers=promising(request, file))
    await answer.prepare(request)
    await answer.write(file.read_bytes()[begin_of(request) :][: 1 << 20])
    return answer


def too_much(request: web.Request, file: Path) -> web.StreamResponse:
    body = file.read_bytes()[begin_of(request) :] + b"more"
    return web.Response(status=206, headers=promising(request, file), body=body)


def wrong(request: web.Request, file: Path) -> web.StreamResponse:
    return web.Response(status=206, headers=promising(request, file), body=bytes(file.stat().st_size))


class ScriptedHosts:
    """A trainer and its peers, each at an address of this machine: a host's next reply is its script's next."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scripts: dict[str, list[Reply]] = {}
        """By host; one without a script has no file."""
        self.asked: list[str] = []
        """Hosts of GET requests, in their order."""
        self.avoided: list[str] = []
        """What each request for the trainer says of peers."""
        self.puts = 0
        """PUT requests."""
        self.publisher: Any = None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        host, name = str(request.url.host), request.match_info["name"]
        if request.method == "PUT":
            self.puts += 1
            return web.Response(status=204)
        self.asked.append(host)
        if host == TRAINER:
            self.avoided.append(request.headers.get("Penstock-Avoid", "none"))
        script = self.scripts.get(host)
        reply = script.pop(0) if script else says(404, "it has no file")
        answer = reply(request, self.folder / f"weights-{name.rpartition('weights-')[2]}")
        return answer if isinstance(answer, web.StreamResponse) else await answer

    def publish(self, version: int, *script: Reply, tensors: Any = None) -> Any:
        """What the trainer does with the requests for it."""
        self.scripts[TRAINER] = list(script)
        self.asked.clear()
        return self.publisher.write(version, (tensors or small_tensors()).items())


class RecordedPauses:
    """A `Backoff` of no time."""

    def __init__(self) -> None:
        self.failures: list[int] = []

    def pause_s(self, failures: int) -> float:
        self.failures.append(failures)
        return 0.001
