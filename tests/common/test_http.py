"""Servers over real sockets: tokens, limits, error bodies, start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry, Gauge
from pydantic import BaseModel
from tests.ports import free_port

from penstock.common import (
    HttpError,
    HttpServer,
    LimitBody,
    RequireToken,
    add_error_handlers,
    bearer_headers,
    bearer_token,
    complete_openapi,
    error_response,
    listen,
    metrics_token,
    opens,
    same_token,
    url_host,
)
from penstock.common.http_server import ServerFailed
from penstock.common.prometheus import metrics_app

TOKEN = "t0ken-ü"


class Body(BaseModel):
    count: int


class Full(Exception):
    pass


def make_app(**errors: Any) -> FastAPI:
    app = FastAPI()

    @app.post("/count")
    async def count(body: Body) -> dict[str, int]:
        return {"count": body.count}

    @app.get("/fail/{kind}")
    async def fail(kind: str) -> None:
        raise {"http": HttpError(409, "version", "too old", errno=2), "full": Full("wait"), "bug": KeyError("x")}[kind]

    @app.get("/state")
    async def state(request: Request) -> dict[str, str]:
        return {"caller": request.state.caller}

    add_error_handlers(app, {Full: lambda error: error_response(429, "", str(error), retry_after_s=1.2)}, **errors)
    return app


@contextlib.asynccontextmanager
async def client_of(app, **settings: Any):
    server = HttpServer(app, listen("127.0.0.1", 0), **settings)
    async with server, httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        yield client


async def test_error_bodies() -> None:
    async with client_of(make_app()) as client:
        assert (await client.post("/count", json={"count": 3})).json() == {"count": 3}
        answers = {
            "field": await client.post("/count", json={"count": "x"}),
            "json": await client.post("/count", content="{", headers={"Content-Type": "application/json"}),
            "type": await client.post("/count", content="{}", headers={"Content-Type": "text/plain"}),
            "path": await client.get("/nowhere"),
            "http": await client.get("/fail/http"),
            "full": await client.get("/fail/full"),
            "bug": await client.get("/fail/bug"),
        }
    found = {name: (answer.status_code, answer.json()["error"]["field"]) for name, answer in answers.items()}
    assert found == {
        "field": (422, "count"),
        "json": (422, ""),
        "type": (422, ""),
        "path": (404, ""),
        "http": (409, "version"),
        "full": (429, ""),
        "bug": (500, ""),
    }
    assert answers["http"].json()["error"] == {"field": "version", "message": "too old", "errno": 2}
    assert answers["full"].headers["Retry-After"] == "2"
    assert "KeyError" in answers["bug"].json()["error"]["message"]
    assert "/nowhere" in answers["path"].json()["error"]["message"]


async def test_error_bodies_without_field_and_with_prefix() -> None:
    async with client_of(make_app(no_field=None, with_body_prefix=True)) as client:
        assert (await client.post("/count", json={})).json()["error"]["field"] == "body.count"
        assert "field" not in (await client.get("/nowhere")).json()["error"]


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (f"Bearer {TOKEN}", 200),
        (f"bearer {TOKEN}", 401),
        (f"Basic {TOKEN}", 401),
        ("Bearer", 401),
        ("Bearer other", 401),
        (TOKEN, 401),
        (None, 401),
    ],
)
async def test_require_token(authorization: str | None, status: int) -> None:
    async with client_of(RequireToken(make_app(), TOKEN)) as client:
        headers = {} if authorization is None else {"Authorization": authorization.encode()}
        answer = await client.post("/count", json={"count": 1}, headers=headers)
        unknown = await client.get("/nowhere", headers=headers)
    assert answer.status_code == status
    assert unknown.status_code == (404 if status == 200 else 401)
    if status == 401:
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert answer.json()["error"]["field"] == "authorization"


async def test_require_token_with_a_function() -> None:
    def authorize(scope, token: str):
        if scope["method"] != "GET":
            raise HttpError(403, "authorization", "read only")
        return {"caller": "me"} if same_token(token, TOKEN) else None

    headers = {"Authorization": f"Bearer {TOKEN}".encode()}
    async with client_of(RequireToken(make_app(), authorize, prefix="/state")) as client:
        assert (await client.get("/state", headers=headers)).json() == {"caller": "me"}
        assert (await client.get("/state")).status_code == 401
        assert (await client.post("/state")).status_code == 403
        assert (await client.post("/count", json={"count": 1})).status_code == 200


def test_tokens() -> None:
    assert same_token(bearer_token(b"Bearer a b"), "a b")
    assert bearer_token(b"Bearer \xff") != ""
    assert not same_token("", "")
    assert bearer_headers("") == {}
    assert bearer_headers("x") == {"Authorization": "Bearer x"}
    with pytest.raises(ValueError, match="token"):
        RequireToken(make_app(), "")


@pytest.mark.parametrize(
    ("path", "token", "opened"),
    [
        ("/x", "run", True),
        ("/metrics", "m", True),
        ("/x", "m", False),
        ("/other", "", False),
        ("/e", "k", True),
        ("/x", "k", False),
        ("/e", "", False),
    ],
)
def test_opens(path: str, token: str, opened: bool) -> None:
    allowed = opens("run", {"/metrics": "m", "/other": ""}, further=lambda path, token: (path, token) == ("/e", "k"))
    assert (allowed({"path": path}, token) is not None) is opened


async def test_limit_body_announced_and_sent() -> None:
    async def chunks():
        for _ in range(3):
            yield b"x" * 50

    async with client_of(LimitBody(make_app(), 100)) as client:
        announced = await client.post("/count", content=b"x" * 101)
        sent = await client.post("/count", content=chunks(), headers={"Content-Type": "application/json"})
        assert (await client.post("/count", json={"count": 1})).status_code == 200
    for answer in (announced, sent):
        assert answer.status_code == 413
        assert "100" in answer.json()["error"]["message"]


def test_complete_openapi() -> None:
    class Line(BaseModel):
        text: str

    app = make_app()
    complete_openapi(app, lambda path: {"401": "no token"} if path == "/count" else {}, (Line,))

    @app.get("/later")
    async def later() -> None: ...

    schema = app.openapi()
    assert {"Line", "ErrorBody", "ErrorDetail"} <= set(schema["components"]["schemas"])
    assert not {"HTTPValidationError", "ValidationError"} & set(schema["components"]["schemas"])
    responses = schema["paths"]["/count"]["post"]["responses"]
    assert set(responses) == {"200", "401"}
    reference = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    assert responses["401"] == {"description": "no token", "content": reference}
    assert "401" not in schema["paths"]["/later"]["get"]["responses"]
    assert schema["security"] == [{"token": []}]


# start and stop ----------------------------------------------------------------------------------------------------
def test_listen_names_port_and_cause() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"port {port} on 127\.0\.0\.1: in use") as caught:
            listen("127.0.0.1", port)
        assert caught.value.errno == errno.EADDRINUSE
        with listen("127.0.0.1", port, ports=8) as free:
            assert port < free.getsockname()[1] < port + 8


def test_url_host() -> None:
    assert (url_host("::1"), url_host("h")) == ("[::1]", "h")
    assert url_host("0.0.0.0") not in ("", "0.0.0.0")


async def test_stop_lets_requests_end() -> None:
    entered, go = asyncio.Event(), asyncio.Event()
    app = FastAPI()

    @app.get("/")
    async def slow() -> str:
        entered.set()
        await go.wait()
        return "done"

    server = HttpServer(app, listen("127.0.0.1", 0))
    await server.start()
    async with httpx.AsyncClient(timeout=60) as client:
        asked = asyncio.create_task(client.get(server.url))
        await entered.wait()
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)
        go.set()
        assert (await asked).json() == "done"
        await stopping
        with pytest.raises(httpx.ConnectError):
            await client.get(server.url)
    await server.stop()


async def test_stop_cuts_requests_at_the_deadline() -> None:
    entered = asyncio.Event()
    app = FastAPI()

    @app.get("/")
    async def hung() -> None:
        entered.set()
        await asyncio.Event().wait()

    server = HttpServer(app, listen("127.0.0.1", 0), stop_s=0.05)
    await server.start()
    async with httpx.AsyncClient(timeout=60) as client:
        asked = asyncio.create_task(client.get(server.url))
        await entered.wait()
        async with asyncio.timeout(30):
            await server.stop()
        answer = (await asyncio.gather(asked, return_exceptions=True))[0]
    assert isinstance(answer, httpx.TransportError) or answer.status_code == 500


async def test_failed_start_raises_and_frees_the_port() -> None:
    @contextlib.asynccontextmanager
    async def broken(_: FastAPI):
        raise RuntimeError("no model")
        yield

    port = free_port()
    with pytest.raises(ServerFailed):
        await HttpServer(FastAPI(lifespan=broken), listen("127.0.0.1", port)).start()
    listen("127.0.0.1", port).close()


SERVE = """
import asyncio, contextlib
from starlette.applications import Starlette
from penstock.common import listen, serve
@contextlib.asynccontextmanager
async def living(_):
    yield
    print("ended", flush=True)
asyncio.run(serve(Starlette(lifespan=living), listen("127.0.0.1", 0), on_ready=lambda url: print(url, flush=True)))
"""


def test_serve_ends_in_order_on_sigterm() -> None:
    process = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert httpx.get(url, timeout=60).status_code == 404
    os.kill(process.pid, signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "ended\n"
    assert process.returncode == -signal.SIGTERM


async def test_metrics_app_opens_to_both_tokens() -> None:
    registry = CollectorRegistry()
    Gauge("penstock_x", "X", registry=registry).set(3)
    async with client_of(metrics_app(registry, "run")) as client:
        for token in ("run", metrics_token("run")):
            answer = await client.get("/metrics", headers=bearer_headers(token))
            assert "penstock_x 3.0" in answer.text
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert (await client.get("/metrics")).status_code == 401
