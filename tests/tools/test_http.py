"""`JsonClient`: texts that are no UTF-8, numbers that are no JSON, and certificates of a private authority."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request

from penstock.tools import JsonClient, ToolInfraError


async def test_http_sends_lone_surrogates_and_nan(serve: Any) -> None:
    app, received = FastAPI(), []

    @app.api_route("/", methods=["GET", "POST"])
    async def take(request: Request) -> str:
        received.append((request.headers.get("content-type"), await request.body(), request.query_params.get("q")))
        return "taken"

    client, url = JsonClient("search"), f"{await serve(app)}/"
    body = {"text": "half \ud800", "score": float("nan")}
    assert await client.ask("POST", url, headers={}, body=body) == "taken"
    assert await client.ask("GET", url, headers={}, params={"q": "half \ud800"}) == "taken"
    await client.close()
    assert received == [
        ("application/json", b'{"text": "half \\ud800", "score": NaN}', None),
        (None, b"", "half ?"),
    ]


async def test_http_an_answer_that_is_too_long_is_called_so(serve: Any) -> None:
    app = FastAPI()

    @app.get("/")
    async def answer() -> list[int]:
        return [1] * 100

    client, url = JsonClient("search"), f"{await serve(app)}/"
    assert len(await client.ask("GET", url, headers={}, most_bytes=1000)) == 100
    with pytest.raises(ToolInfraError, match="100 bytes or more"):  # and not: no JSON
        await client.ask("GET", url, headers={}, most_bytes=100)
    await client.close()


async def test_http_trusts_the_authorities_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with: apt-get install openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=test"]
    files = ["-keyout", str(key), "-out", str(certificate), "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", "req", "-x509", *made, *files], check=True, capture_output=True, timeout=60)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n42")
        await writer.drain()
        writer.close()

    client = JsonClient("search")
    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        assert await client.ask("GET", f"https://127.0.0.1:{port}/", headers={}) == 42
        await client.close()
