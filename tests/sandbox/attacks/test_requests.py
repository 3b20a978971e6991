"""The server itself: requests that no client of ours sends, by one who has the token and one who has not."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from tests.sandbox.attacks.targets import TOKEN, Target
from tests.sandbox.backends import on_every_backend

from penstock.sandbox import SandboxLost

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.bwrap,
    pytest.mark.parametrize("target", ["remote"], indirect=True, scope="package"),
]
HUGE = 200 << 20


def client(target: Target, token: str = TOKEN) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=target.url, headers={"Authorization": f"Bearer {token}"}, timeout=60)


@on_every_backend
async def test_attack_bodies_without_an_end_are_cut_off(target: Target) -> None:
    async def flood() -> object:
        for _ in range(HUGE >> 20):
            yield b"x" * (1 << 20)

    path = f"/sessions/{target.neighbour.session_id}"
    async with client(target) as http:
        for method, url in (("POST", f"{path}/run_python"), ("PUT", f"{path}/files?path=x"), ("POST", "/sessions")):
            try:
                answer = await http.request(method, url, content=flood())
            except httpx.TransportError:
                continue  # hung up on, which is an answer too
            assert answer.status_code in (400, 413, 422)
    await target.visit_neighbour()


@on_every_backend
async def test_attack_nonsense_is_refused_and_served_after(target: Target) -> None:
    path = f"/sessions/{target.neighbour.session_id}"
    bodies = [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"argv": []}', b'{"argv": ["true"], "timeout_s": NaN}']
    bodies += [b'{"argv": ["true"], "timeout_s": 1e300}', b'{"argv": ["true"], "do": "write"}', b"[" * 100_000]
    async with client(target) as http:
        for body in bodies:
            assert (await http.post(f"{path}/run", content=body)).status_code in (400, 422), body[:50]
        for number in ("-1", "1e9", "99999999999999999999", "x"):
            answer = await http.get(f"{path}/files", params={"path": "x", "max_bytes": number})
            assert answer.status_code in (400, 422)
    await target.visit_neighbour()


@on_every_backend
async def test_attack_ids_that_are_paths_lead_to_no_session(target: Target) -> None:
    for name in ("../health", "..%2f..%2fhealth", "", "a/b", "*", "%00", "\u202e", "0" * 24):
        with pytest.raises(SandboxLost):
            await target.sandbox.attach(name)


@on_every_backend
async def test_attack_without_the_token_nothing_is_told(target: Target) -> None:
    path = f"/sessions/{target.neighbour.session_id}"
    async with client(target, "wrong") as http:
        for method, url in (("GET", path), ("DELETE", path), ("POST", f"{path}/run"), ("GET", f"{path}/files?path=x")):
            answer = await http.request(method, url, json={"argv": ["true"]})
            assert answer.status_code == 401
            assert target.neighbour.session_id not in answer.text
    await target.visit_neighbour()


@on_every_backend
async def test_attack_callers_that_send_half_a_request_and_stay(target: Target) -> None:
    host, port = target.url.removeprefix("http://").split(":")
    idle = [await asyncio.open_connection(host, int(port)) for _ in range(200)]
    for number, (_, writer) in enumerate(idle):
        writer.write(b"POST /sessions HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n{" if number % 2 else b"GET /hea")
    await target.visit_neighbour()
    for _, writer in idle:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for _, writer in idle), return_exceptions=True)
