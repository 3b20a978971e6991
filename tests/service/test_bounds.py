"""Attacks on the memory of the API and of Redis: bodies and queues over their bounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import pytest
from service_parts import KEYS, NAME, Client, Service, forward_body

from penstock.service.bodies import MOST_BYTES
from penstock.service.calls import RunRecord
from penstock.service.messages import PROTOBUF
from penstock.transfer_queue import RequestResult

pytestmark = pytest.mark.redis


@pytest.fixture
async def client(service: Service) -> Client:
    return service.client()


async def model_of(service: Service, owner: str) -> str:
    """A model without a trainer that makes it: request 1 is what would."""
    client, requests = service.client(owner), service.queue.requests
    session = (await client.post("create_session", tags=[]))["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": NAME}
    answer = await client.post("create_model", **body, lora_config={"rank": 4})
    run = RunRecord(owner=owner, session_id=session, base_model=NAME, rank=4, created=0.0)
    name: str = answer["model_id"]
    await requests.finish(answer["request_id"], RequestResult("application/json", b"{}"), [run.record(name)])
    return name


async def in_pieces(size: int) -> AsyncIterator[bytes]:
    for _ in range(size >> 20):
        yield bytes(1 << 20)


@pytest.mark.parametrize("is_announced", [True, False])
@pytest.mark.parametrize(("route", "bound"), [("forward_backward", MOST_BYTES), ("asample", (1 << 20) + 16 * 256)])
async def test_a_body_over_its_bound_is_refused_and_the_next_call_is_answered(
    client: Client, route: str, bound: int, is_announced: bool
) -> None:
    size = bound + (2 << 20)
    sent = bytes(size) if is_announced else in_pieces(size)
    headers = {"X-API-Key": KEYS["alice"], "Content-Type": PROTOBUF if route == "forward_backward" else "text/json"}
    try:
        async with client._session.post(f"{client._url}/{route}", data=sent, headers=headers) as answer:
            assert answer.status == 413
            assert str(bound) in await answer.text()
    except aiohttp.ClientConnectionError:
        pass  # the server has answered and closed while the client was sending
    assert (await client.call("GET", "training_runs"))[0] == 200


@pytest.mark.parametrize("body", [b"[" * 10**6, b'{"a":' * 10**5, b"\xff" * 10**6, b'"' + b"a" * 10**6])
async def test_malformed_json_of_any_depth_is_refused(client: Client, body: bytes) -> None:
    status, answer = await client.call("POST", "asample", body, **{"Content-Type": "application/json"})
    assert status in (400, 422), answer
    assert answer["error"]["message"]


@asynccontextmanager
async def held_upload(service: Service, owner: str, size: int) -> AsyncIterator[None]:
    """A client that announces a body, sends a piece of it, and waits."""
    address = urlsplit(service.url)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    lines = ("POST /api/v1/forward_backward HTTP/1.1", f"Host: {address.netloc}", f"X-API-Key: {KEYS[owner]}")
    head = "\r\n".join([*lines, f"Content-Type: {PROTOBUF}", f"Content-Length: {size}", "", ""])
    writer.write(head.encode() + bytes(1 << 10))
    await writer.drain()
    try:
        yield
    finally:
        writer.close()


async def test_bodies_that_one_key_holds_back_refuse_its_next_ones_and_nobody_elses(service: Service) -> None:
    alice, bob = service.client("alice"), service.client("bob")
    data = forward_body("no model", 1, ids=np.arange(1 << 17).tolist())
    async with AsyncExitStack() as uploads:
        for _ in range(4):
            await uploads.enter_async_context(held_upload(service, "alice", MOST_BYTES))
        status, answer = await alice.send_forward(data)
        async with asyncio.timeout(60):
            while status != 429:  # until the server has read the heads of all four
                status, answer = await alice.send_forward(data)
        assert str(4 * MOST_BYTES) in answer["error"]["message"]
        assert (await bob.send_forward(data))[0] == 404
    async with asyncio.timeout(60):
        while (await alice.send_forward(data))[0] == 429:
            await asyncio.sleep(0.05)


async def test_bytes_that_wait_are_bounded_and_what_a_model_waits_for_is_taken(service: Service) -> None:
    model, bobs = await model_of(service, "alice"), await model_of(service, "bob")
    alice, bob, requests = service.client("alice"), service.client("bob"), service.queue.requests
    size = len(forward_body(model, 1))
    object.__setattr__(service.context, "owner_bytes", 6 * size + size // 2)
    waiting = [await alice.forward(model, number) for number in (4, 3, 2)]
    status, answer = await alice.send_forward(forward_body(model, 5))
    assert (status, str(3 * size + size // 4) in answer["error"]["message"]) == (429, True)
    assert (await bob.send_forward(forward_body(bobs, 2)))[0] == 200
    first = await alice.forward(model, 1)
    assert (await requests.read(0, 9))[-4:] == [first, *reversed(waiting)]
    too_long = forward_body(model, 5, ids=list(range(400)))
    assert len(too_long) > service.context.owner_bytes
    status, answer = await alice.send_forward(too_long)
    assert (status, "transfer_queue.max_bytes" in answer["error"]["message"]) == (413, True)
    for request in (first, *reversed(waiting)):
        await requests.finish(request, RequestResult("application/json", b"{}"))
    assert (await requests.counts())["bytes"]["alice"] == 0
    assert (await alice.send_forward(forward_body(model, 5)))[0] == 200


async def test_requests_that_wait_for_one_that_never_came_end_with_their_session(service: Service) -> None:
    model = await model_of(service, "alice")
    client, requests = service.client("alice"), service.queue.requests
    behind = [await client.forward(model, number) for number in (3, 4)]
    result = RequestResult("application/json", json.dumps({"error": "over", "category": "user"}).encode())
    assert await requests.end_waiting(f"model:{model}", result) == 2
    for request in behind:
        assert (await client.result(request))["error"] == "over"
    counts = await requests.counts()
    assert (counts["waiting"]["alice"], counts["bytes"]["alice"]) == (0, 0)
    assert await requests._command("PTTL", f"index:model:{model}") > 0, "the index of a model that ended is not kept"
    assert await requests.end_waiting(f"model:{model}", result) == 0
    run = [await client.forward(model, number) for number in (1, 2)]
    assert (await requests.read(0, 9))[-2:] == run


async def test_results_that_are_not_fetched_are_bounded_and_fetched_ones_are_soon_forgotten(service: Service) -> None:
    model = await model_of(service, "alice")
    client, requests = service.client(), service.queue.requests
    size = len(forward_body(model, 1))
    object.__setattr__(service.context, "owner_bytes", 8 * size)
    done = [await client.forward(model, number) for number in (1, 2)]
    for request in done:
        await requests.finish(request, RequestResult("application/json", b'"%b"' % (b"x" * 4 * size)))
    status, answer = await client.send_forward(forward_body(model, 3))
    assert (status, "not fetched" in answer["error"]["message"]) == (429, True)
    for request in (done[0], done[0], done[1]):
        assert (await client.call("POST", "retrieve_future", {"request_id": request}))[0] == 200
    assert (await client.send_forward(forward_body(model, 3)))[0] == 200
    assert await requests._command("PTTL", f"request:{done[0]}") == -1, (
        "a trainer that restarts asks whether it was done"
    )
    await requests.read(0, 9)
    await requests.trim(3)
    assert 0 < await requests._command("PTTL", f"request:{done[0]}") <= 600_000


async def test_samples_count_with_the_longest_results_that_they_may_have(service: Service) -> None:
    client, requests = service.client(), service.queue.requests
    session = (await client.post("create_session", tags=[]))["session_id"]
    of_base = {"session_id": session, "sampling_session_seq_id": 0, "base_model": NAME}
    sampler = (await client.post("create_sampling_session", **of_base))["sampling_session_id"]

    def sample(number: int, samples: int) -> dict[str, object]:
        prompt, params = {"chunks": [{"tokens": [1] * 56}]}, {"max_tokens": 1000}
        call = {"prompt": prompt, "sampling_params": params, "sampling_session_id": sampler}
        return {**call, "seq_id": number, "num_samples": samples}

    object.__setattr__(service.context, "owner_bytes", 2 * 40_000)
    first = await client.post("asample", **sample(0, 20))  # 20 · 200 · 8 bytes
    assert 32_000 < (await requests.counts())["bytes"]["alice"] < 36_000
    assert (await client.call("POST", "asample", sample(1, 5)))[0] == 429
    status, answer = await client.call("POST", "asample", sample(1, 26))
    assert (status, "transfer_queue.max_bytes" in answer["error"]["message"]) == (413, True)
    await requests.finish(first["request_id"], RequestResult("application/json", b"{}"))
    assert (await requests.counts())["bytes"]["alice"] == 0
    assert (await client.call("POST", "asample", sample(1, 5)))[0] == 200


async def test_results_that_nobody_fetched_in_time_do_not_count_for_ever(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await model_of(service, "alice")
    client, requests = service.client(), service.queue.requests
    size = len(forward_body(model, 1))
    object.__setattr__(service.context, "owner_bytes", 4 * size)
    request = await client.forward(model, 1)
    monkeypatch.setattr("penstock.transfer_queue.redis.requests.RETENTION_S", 0.0)
    await requests.finish(request, RequestResult("application/json", b'"%b"' % (b"x" * 8 * size)))
    assert (await client.send_forward(forward_body(model, 2)))[0] == 200
