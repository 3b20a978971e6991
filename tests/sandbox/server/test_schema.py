"""The OpenAPI schema against the server: whatever is sent is answered as it says, and nothing fails here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.sandbox.server.conftest import TOKEN, headers, serving
from tests.schemas import in_thread, try_out

from penstock.sandbox import SandboxConfig

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance

pytestmark = pytest.mark.bwrap
CONFIG = SandboxConfig(max_boxes=3, run_timeout_s=1.0)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with in_thread(serving(CONFIG)) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers=headers(), timeout=60.0) as made:
        yield made


def operations(url: str) -> list[Any]:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=headers())
    return [found.ok() for found in schema.get_all_operations()]


def test_schema_every_route_refuses_a_missing_and_a_wrong_token(url: str, client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    routes = [(method, path) for path, methods in paths.items() for method in methods]
    assert len(routes) >= 15
    more = [("get", "/openapi.json"), ("get", "/docs"), ("get", "/"), ("post", "/nothing")]
    with httpx.Client(base_url=url) as stranger:
        for method, path in [*routes, *more]:
            for given_headers in ({}, headers("wrong"), {"Authorization": TOKEN}, {"Authorization": f"Basic {TOKEN}"}):
                answer = stranger.request(method, path.replace("{session_id}", "x"), headers=given_headers)
                assert answer.status_code == 401, (method, path)
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["message"] == "a bearer token of this server is needed"


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_schema_whatever_is_sent_is_answered_as_the_schema_says(url: str, client: httpx.Client, mode: Any) -> None:
    """All of schemathesis' checks: no 5xx; documented status, type and body; bad data and bad tokens refused."""
    for operation in operations(url):
        client.delete("/sessions", params={"label": ""})
        session_id = client.post("/sessions", json={"ttl_s": 600.0}).json()["session_id"]

        def prepare(case: Any, path: str = operation.path, session_id: str = session_id) -> None:
            if path == "/sessions":  # those of the cases before hold boxes, of which there are few
                client.delete("/sessions", params={"label": ""})
            if "session_id" in (case.path_parameters or {}) and case.operation.method.upper() != "DELETE":
                case.path_parameters["session_id"] = session_id
            if isinstance(case.body, dict) and isinstance(case.body.get("timeout_s"), float):
                case.body["timeout_s"] = min(case.body["timeout_s"], 1.0)

        # what is valid by the schema may still ask for a file that is not there, or for an image that cannot be had
        excluded = [positive_data_acceptance, ignored_auth]
        try_out(operation, mode, headers(), examples=4, excluded=excluded, prepare=prepare)


@pytest.mark.parametrize(
    ("content", "content_type", "status"),
    [
        (b"{", "application/json", 422),
        (b"[" * 200_000, "application/json", 400),
        (b"\xff\xfe", "application/json", 422),
        (b'{"argv": ["true"]}', "text/plain", 422),
        (b"", "application/json", 422),
        (b'{"argv": ["true"], "timeout_s": NaN}', "application/json", 422),
        (b'{"argv": ["true"], "timeout_s": 1e999}', "application/json", 422),
        (b'{"argv": ["true"], "timeout_s": "1"}', "application/json", 422),
        (b'{"argv": ["true"], "timeout_s": true}', "application/json", 422),
        (b'{"argv": ["true"], "more": 1}', "application/json", 422),
        (b'{"argv": ["\\ud800"]}', "application/json", 422),
        (b'{"argv": ["true"], "timeout_s": ' + b"9" * 5000 + b"}", "application/json", 400),
    ],
)
def test_schema_bodies_that_are_no_request(
    client: httpx.Client, content: bytes, content_type: str, status: int
) -> None:
    client.delete("/sessions", params={"label": ""})
    session_id = client.post("/sessions", json={}).json()["session_id"]
    path = f"/sessions/{session_id}/run"
    answer = client.post(path, content=content, headers={"Content-Type": content_type})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


def test_schema_what_no_program_can_be_given_is_an_observation(client: httpx.Client) -> None:
    client.delete("/sessions", params={"label": ""})
    path = f"/sessions/{client.post('/sessions', json={}).json()['session_id']}"
    for body in ({"argv": ["a\0b"]}, {"argv": ["true", "\0"]}, {"argv": [""]}, {"argv": ["true"], "cwd": "\0"}):
        answer = client.post(f"{path}/run", json=body)
        assert (answer.status_code, answer.json()["exit_code"] != 0) == (200, True), body
    shell = client.post(f"{path}/run_shell", json={"command": "a\0b"}).json()
    assert (shell["exit_code"], shell["stderr"]) == (1, "the command holds a NUL character\n")
    for odd in ("a\0b", "x" * 300, "."):
        assert client.get(f"{path}/files", params={"path": odd}).status_code == 409, odd
