"""The process of `fake_http`: it streams tokens as vLLM does, one event per token, and changes its version on request.

    decode    every `--token-s`: one token of each running request, into the request's queue
    answer    per connection: queue ──► events, as fast as the client reads; the last has the spans of the whole answer

So `/pause` returns when nothing is sampled any more, while events may still be on their way, as in the real ones.

    POST /inference/v1/generate · /pause · /resume · /load {"weight_version"} · /sleep
    GET  /weight_info · /health · /openapi.json · /load_figures

Standard library and a hash: it starts in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.testing.fake_tokens import next_token

GENERATE = "/inference/v1/generate"
KEY_VARIABLE = "FAKE_SERVER_KEY"
LOGPROB = -1.25
"""Of every token with `--quick`."""


@dataclass(slots=True, eq=False)
class Running:
    """One request."""

    context: list[int]
    left: int
    stops: frozenset[int]
    events: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    """An empty one is the last."""
    spans: list[dict[str, Any]] = field(default_factory=list)
    sampled: int = 0

    def took(self, version: int) -> None:
        """One more token of `version`."""
        if not self.spans or self.spans[-1]["version"] != str(version):
            self.spans.append({"version": str(version), "start": self.sampled, "end": self.sampled})
        self.sampled += 1
        self.left -= 1
        self.spans[-1]["end"] = self.sampled


class Decoder:
    """The model, if there were one."""

    def __init__(self, token_s: float, slots: int, *, quick: bool) -> None:
        """`quick`: tokens that cost nothing, the same always."""
        self.version = 0
        self.running: list[Running] = []
        self.most = 0
        """Requests at once, so far."""
        self.sampled = 0
        self._token_s, self._slots, self._quick = token_s, slots, quick
        self._awake = asyncio.Event()
        self.resume()

    def pause(self) -> None:
        """A step is never interrupted: nothing is sampled from now on."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._awake.set()

    def add(self, request: Running) -> None:
        self.running.append(request)
        self.most = max(self.most, len(self.running))
        self._awake.set()

    def remove(self, request: Running) -> None:
        if request in self.running:
            self.running.remove(request)

    def abort_all(self) -> None:
        for request in list(self.running):
            self._end(request, [], [], "abort")

    async def run(self) -> None:
        while True:
            if self._paused or not self.running:
                self._awake.clear()
                await self._awake.wait()
                continue
            for request in self.running[: self._slots]:
                self._sample(request)
            await asyncio.sleep(self._token_s)

    def _sample(self, request: Running) -> None:
        token, logprob = (7, LOGPROB) if self._quick else next_token(request.context, self.version)
        if not self._quick:
            request.context.append(token)
        request.took(self.version)
        self.sampled += 1
        if token in request.stops:
            self._end(request, [token], [logprob], "stop")
        elif not request.left:
            self._end(request, [token], [logprob], "length")
        else:
            request.events.put_nowait(QUICK_EVENT if self._quick else event([token], [logprob]))

    def _end(self, request: Running, ids: list[int], logprobs: list[float], reason: str) -> None:
        self.remove(request)
        request.events.put_nowait(event(ids, logprobs, reason, request.spans))
        request.events.put_nowait(b"")


def event(
    ids: list[int], logprobs: list[float], reason: str | None = None, spans: list[dict[str, Any]] | None = None
) -> bytes:
    """As vLLM's token endpoint sends it."""
    content = [{"token_id": token, "logprob": logprob} for token, logprob in zip(ids, logprobs, strict=True)]
    choice = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": reason, "weight_versions": spans}
    return b"data: %b\n\n" % json.dumps({"choices": [choice]}).encode()


QUICK_EVENT = event([7], [LOGPROB])


class FrontEnd:
    """One connection after the other's request."""

    def __init__(self, decoder: Decoder, key: str) -> None:
        self._decoder, self._authorization = decoder, f"Bearer {key}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the client has gone
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection is kept."""
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        method, path, _ = first.split(" ")
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        kept = headers.get("connection", "").lower() != "close"
        if headers.get("authorization") != self._authorization:
            self._reply(writer, 401, {"error": {"message": "another key"}}, kept=kept)
        elif path == GENERATE:
            await self._generate(json.loads(body), writer)
        else:
            status, answer = self._control(f"{method} {path}", json.loads(body or b"{}"))
            self._reply(writer, status, answer, kept=kept)
        return kept

    def _control(self, what: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        decoder = self._decoder
        match what:
            case "POST /pause":
                decoder.pause()
            case "POST /resume":
                decoder.resume()
            case "POST /load":
                decoder.version = int(body["weight_version"])
            case "POST /sleep":
                decoder.pause()
                decoder.abort_all()
            case "GET /weight_info":
                return 200, {"weight_version": str(decoder.version)}
            case "GET /load_figures":
                return 200, {"running": len(decoder.running), "most": decoder.most, "sampled": decoder.sampled}
            case "GET /health":
                return 200, {}
            case "GET /openapi.json":
                return 200, {"paths": {GENERATE: {}}}
            case _:
                return 404, {"error": {"message": f"no {what}"}}
        return 200, {}

    async def _generate(self, body: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
        request = Running(list(body["token_ids"]), body["max_tokens"], frozenset(body["stop_token_ids"]))
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head)
        self._decoder.add(request)
        try:
            while data := await request.events.get():
                writer.write(b"%x\r\n%b\r\n" % (len(data), data))
                await writer.drain()
        finally:
            self._decoder.remove(request)
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _reply(self, writer: asyncio.StreamWriter, status: int, answer: Mapping[str, Any], *, kept: bool) -> None:
        data = json.dumps(answer).encode()
        head = f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        writer.write(f"{head}Connection: {'keep-alive' if kept else 'close'}\r\n\r\n".encode() + data)


async def main() -> None:
    """``python -m penstock.testing.fake_http_server --uds FILE --token-s S --slots N [--quick]``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds", required=True, help="unix socket to listen on")
    parser.add_argument("--token-s", type=float, required=True)
    parser.add_argument("--slots", type=int, required=True, help="requests decoded together")
    parser.add_argument("--quick", action="store_true", help="the same token always")
    arguments = parser.parse_args()
    decoder = Decoder(arguments.token_s, arguments.slots, quick=arguments.quick)
    front_end = FrontEnd(decoder, os.environ[KEY_VARIABLE])
    server = await asyncio.start_unix_server(front_end.serve, arguments.uds)
    async with server:
        await decoder.run()


if __name__ == "__main__":
    asyncio.run(main())
