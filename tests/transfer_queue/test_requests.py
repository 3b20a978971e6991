"""Requests of a service's clients: one id per number, run in order, one result."""

from __future__ import annotations

import pytest

from penstock.transfer_queue import ClientRequest, LogForgotten, Record, RedisTransferQueue, RequestResult

pytestmark = pytest.mark.redis


def request_of(number: int, body: bytes = b"x", **fields: object) -> ClientRequest:
    return ClientRequest("me", "optim_step", body, "model-a", number, **fields)  # type: ignore[arg-type]


async def test_numbers_are_run_in_order_however_they_arrive(queue: RedisTransferQueue) -> None:
    ids = {number: (await queue.requests.submit(request_of(number), 9))[1] for number in (3, 2)}
    assert await queue.requests.read(0, 9) == []
    ids |= {number: (await queue.requests.submit(request_of(number), 9))[1] for number in (1, 4)}
    assert await queue.requests.read(0, 9) == [ids[number] for number in (1, 2, 3, 4)]
    assert await queue.requests.read(2, 1) == [ids[3]]


async def test_a_repeated_request_gets_the_first_id_and_the_first_result(queue: RedisTransferQueue) -> None:
    requests = queue.requests
    how, first = await requests.submit(request_of(1), 9)
    assert how == "new"
    assert await requests.submit(request_of(1), 9) == ("known", first)
    assert await requests.submit(request_of(1, b"another"), 9) == ("other", first)
    assert await requests.read(0, 9) == [first]
    assert await requests.done([first, "unknown"]) == {"unknown"}
    assert await requests.finish(first, RequestResult("json", b"1"), [Record("run", "a", "{}")])
    assert not await requests.finish(first, RequestResult("json", b"2"), [Record("run", "a", "other")])
    assert await requests.result(first) == RequestResult("json", b"1")
    assert await requests.records("run") == {"a": "{}"}
    await requests.trim(1)
    assert await requests.submit(request_of(1), 9) == ("known", first)
    assert await requests.request(first) is None  # its body is gone
    assert await requests.result(first) == RequestResult("json", b"1")
    for position in (0, 2):
        with pytest.raises(LogForgotten):
            await requests.read(position, 1)


async def test_a_request_too_many_is_refused_until_one_has_a_result(queue: RedisTransferQueue) -> None:
    _, first = await queue.requests.submit(request_of(1), 2)
    await queue.requests.submit(request_of(2), 2)
    assert await queue.requests.submit(request_of(3), 2) == ("full", "")
    assert (await queue.requests.submit(request_of(2), 2))[0] == "known"
    await queue.requests.finish(first, RequestResult("json", b"1"))
    assert (await queue.requests.submit(request_of(3), 2))[0] == "new"


async def test_requests_without_an_order_are_open_until_they_are_done(queue: RedisTransferQueue) -> None:
    _, seventh = await queue.requests.submit(request_of(7, ordered=False), 9)
    assert await queue.requests.open_requests() == [seventh]
    found = await queue.requests.request(seventh)
    assert found is not None
    assert found.body == b"x"
    await queue.requests.finish(seventh, RequestResult("json", b"1"))
    assert await queue.requests.open_requests() == []
    assert await queue.requests.submit(request_of(7, ordered=False), 9) == ("known", seventh)
