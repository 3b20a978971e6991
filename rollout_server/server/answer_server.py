"""A process beside a sidecar: it answers POST /generate on connections that the sidecar hands to it.

    control      begin, then states, in order ──► engine (`HttpEngine.adopt`); each is answered when it holds
    connections  a descriptor each ──► HTTP ──┬─ /generate ──► RequestQueue ──► the engine's server
                                              └─ all else, and requests with images ──► the sidecar (`SidecarProxy`)

It has no model, no queue and no port. It ends with its sidecar: orderly by ``end``, else when the control connection
ends, or by the kernel where it does not run any more.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import uvloop
from pydantic_core import from_json, to_json
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.common import (
    HttpConnections,
    LimitBody,
    RequireToken,
    die_with_parent,
    export_spans,
    frozen_start,
    import_object,
)
from penstock.rollout_server.engines.child_link import LINE_LIMIT_BYTES
from penstock.rollout_server.engines.http.engine import HttpEngine
from penstock.rollout_server.protocol import Chunk, GenerateRequest
from penstock.rollout_server.server.answers import GENERATE, QuickGenerate
from penstock.rollout_server.server.metrics import RolloutMetrics
from penstock.rollout_server.server.request_queue import NotServing, RequestQueue
from penstock.rollout_server.server.sidecar_proxy import SidecarProxy
from penstock.rollout_server.server.sidecar_state import ProcessCounts, ProcessSpec, SidecarState

HTTP_STOP_S = 5.0
STARTING = SidecarState(accepting=False, cause="this process is starting", turns_away=False, engine=None)


class AnswerServer:
    """Implements `answers.Answering`. One event loop owns it."""

    def __init__(self, spec: ProcessSpec) -> None:
        """Raises `UnknownName` where there is no such engine."""
        self.name = spec.server
        engine_class: type[HttpEngine] = import_object(spec.engine_class)
        self.engine = engine_class(spec.config, spec.model, Path(spec.log_dir), 0, beside=True)
        self._metrics = RolloutMetrics()
        self.requests = RequestQueue(
            spec.slots,
            self._metrics,
            truncated_sampling=spec.config.truncated_sampling,
            on_engine_error=self._note_engine_error,
        )
        self._state = STARTING
        self._engine_errors = 0
        self._accepted = 0
        self._proxy = SidecarProxy(spec.sidecar_socket)
        self._connections = HttpConnections(self._app(spec.token), hostile=False)

    def _app(self, token: str) -> ASGIApp:
        quick = QuickGenerate(self._proxy, self, sees_images=False)
        answering = RequireToken(LimitBody(quick), token, message="a bearer token of this run is needed")

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await (answering if scope.get("path") == GENERATE else self._proxy)(scope, receive, send)

        return app

    # answers -------------------------------------------------------------------------------------------------------
    def admit(self, request: GenerateRequest) -> GenerateRequest:
        """See `Answering`."""
        if not self._state.accepting or self.engine.info is None:
            raise NotServing(self._state.cause or "the engine is being started")
        return self.requests.admit(request, self.engine.info, self.engine.labels.version)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """See `Answering`."""
        return self.requests.generate(self.engine, request)

    def _note_engine_error(self) -> None:
        self._engine_errors += 1

    # the sidecar's calls -------------------------------------------------------------------------------------------
    def accept(self, connection: socket.socket) -> None:
        self._accepted += 1
        self._connections.accept(connection)

    async def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """The reply's own fields."""
        match message["op"]:
            case "state":
                return {"continuing": await self._take_over(SidecarState.model_validate(message["state"]))}
            case "end":
                await self._connections.close(HTTP_STOP_S)
        return {"counts": self._counts().model_dump()}

    async def _take_over(self, state: SidecarState) -> tuple[int, float]:
        self._state = state
        self.requests.turns_away = state.turns_away
        return await self.engine.adopt(state.engine)

    def _counts(self) -> ProcessCounts:
        tokens = self._metrics.tokens_so_far
        return ProcessCounts(
            in_flight=self.requests.in_flight,
            in_flight_tokens=self.requests.in_flight_tokens,
            silent_s=self.requests.silent_s if tokens or self.requests.in_flight else None,
            answered=self.requests.answered,
            tokens=tokens,
            outcomes=self._metrics.requests_so_far,
            engine_errors=self._engine_errors,
            connections=self._connections.count,
            accepted=self._accepted,
        )

    async def close(self) -> None:
        await self._connections.close()
        await self.engine.adopt(None)
        await self._proxy.close()


async def serve(control: socket.socket, connections: socket.socket) -> None:
    """Until the sidecar ends it, or is gone."""
    reader, writer = await asyncio.open_connection(sock=control, limit=LINE_LIMIT_BYTES)
    if not (line := await reader.readline()):
        return
    begin = from_json(line)
    spec = ProcessSpec.model_validate(begin["spec"])
    server = AnswerServer(spec)
    loop = asyncio.get_running_loop()
    connections.setblocking(False)
    loop.add_reader(connections, _receive, connections, server)
    facts = {"penstock.run": spec.run, "penstock.role": "rollout"}
    try:
        async with export_spans("penstock-rollout", {"penstock.run": spec.run}, instance=spec.server, facts=facts):
            _reply(writer, begin, {})
            await _converse(reader, writer, server)
    finally:
        loop.remove_reader(connections)
        await server.close()
        writer.close()


async def _converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: AnswerServer) -> None:
    while line := await reader.readline():
        message = from_json(line)
        _reply(writer, message, await server.answer(message))
        if message["op"] == "end":
            await writer.drain()
            return


def _reply(writer: asyncio.StreamWriter, message: dict[str, Any], fields: dict[str, Any]) -> None:
    if message.get("call") is not None:
        writer.write(to_json({"event": "reply", "call": message["call"], **fields}) + b"\n")


def _receive(connections: socket.socket, server: AnswerServer) -> None:
    """Every connection that was handed over."""
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(connections, 1, 1)
        except BlockingIOError:
            return
        for descriptor in descriptors:
            server.accept(socket.socket(fileno=descriptor))
        if not data:  # the sidecar hands over no more
            asyncio.get_running_loop().remove_reader(connections)
            return


def main() -> None:
    """``python -m penstock.rollout_server.server.answer_server --control FD --connections FD``."""
    die_with_parent(signal.SIGKILL)
    parser = argparse.ArgumentParser(prog=Path(__file__).stem)
    parser.add_argument("--control", type=int, required=True, help="inherited end of a socket pair")
    parser.add_argument("--connections", type=int, required=True, help="of another one")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    control, connections = socket.socket(fileno=arguments.control), socket.socket(fileno=arguments.connections)
    with connections, frozen_start(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(control, connections))


if __name__ == "__main__":
    main()
