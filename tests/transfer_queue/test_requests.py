"""Requests of a service's clients: one id per number, run in order, one result."""

from __future__ import annotations

import pytest
from redis_parts import CONFIG

from penstock.transfer_queue import (
    ClientRequest,
    LogForgotten,
    QueueUnavailable,
    Record,
    RedisTransferQueue,
    RequestResult,
)

pytestmark = pytest.mark.redis


BOUNDS = (9, 99, 1000)


def request_of(
    number: int, body: bytes = b"x", *, owner: str = "me", model: str = "a", ordered: bool = True
) -> ClientRequest:
    return ClientRequest(owner, "optim_step", body, f"model-{model}", number, ordered)


async def test_numbers_are_run_in_order_however_they_arrive(queue: RedisTransferQueue) -> None:
    ids = {number: (await queue.requests.submit(request_of(number), *BOUNDS))[1] for number in (3, 2)}
    assert await queue.requests.read(0, 9) == []
    ids |= {number: (await queue.requests.submit(request_of(number), *BOUNDS))[1] for number in (1, 4)}
    assert await queue.requests.read(0, 9) == [ids[number] for number in (1, 2, 3, 4)]
    assert await queue.requests.read(2, 1) == [ids[3]]


async def test_a_repeated_request_gets_the_first_id_and_the_first_result(queue: RedisTransferQueue) -> None:
    requests = queue.requests
    how, first = await requests.submit(request_of(1), *BOUNDS)
    assert how == "new"
    assert await requests.submit(request_of(1), *BOUNDS) == ("known", first)
    assert await requests.submit(request_of(1, b"another"), *BOUNDS) == ("other", first)
    assert await requests.read(0, 9) == [first]
    assert await requests.done([first, "unknown"]) == {"unknown"}
    assert await requests.finish(first, RequestResult("json", b"1"), [Record("run", "a", "{}")])
    assert not await requests.finish(first, RequestResult("json", b"2"), [Record("run", "a", "other")])
    assert await requests.result(first) == RequestResult("json", b"1")
    assert await requests.records("run") == {"a": "{}"}
    await requests.trim(1)
    assert await requests.submit(request_of(1), *BOUNDS) == ("known", first)
    assert await requests.request(first) is None  # its body is gone
    assert await requests.result(first) == RequestResult("json", b"1")
    for position in (0, 2):
        with pytest.raises(LogForgotten):
            await requests.read(position, 1)


@pytest.mark.parametrize(("bounds", "refusal"), [((2, 99, 99), "full"), ((99, 2, 99), "quota")])
async def test_a_request_too_many_of_a_model_or_an_owner_is_refused_until_one_has_a_result(
    queue: RedisTransferQueue, bounds: tuple[int, int, int], refusal: str
) -> None:
    _, first = await queue.requests.submit(request_of(1), *bounds)
    await queue.requests.submit(request_of(2), *bounds)
    assert await queue.requests.submit(request_of(3), *bounds) == (refusal, "")
    assert (await queue.requests.submit(request_of(2), *bounds))[0] == "known"
    assert (await queue.requests.submit(request_of(1, owner="other", model="b"), *bounds))[0] == "new"
    await queue.requests.finish(first, RequestResult("json", b"1"))
    assert (await queue.requests.submit(request_of(3), *bounds))[0] == "new"


@pytest.mark.parametrize("bounds", [(2, 99, 99), (99, 2, 99), (99, 99, 4)])
async def test_the_request_that_a_model_waits_for_is_never_too_many(
    queue: RedisTransferQueue, bounds: tuple[int, int, int]
) -> None:
    """Refused, it would wait for ever for the ones that wait for it: the client sends later parts of a call first."""
    later = [(await queue.requests.submit(request_of(number), *bounds))[1] for number in (3, 2)]
    how, first = await queue.requests.submit(request_of(1), *bounds)
    assert how == "new"
    assert await queue.requests.read(0, 9) == [first, *reversed(later)]


async def test_owners_take_turns_however_many_requests_one_has(queue: RedisTransferQueue) -> None:
    async def submitted(count: int, owner: str, model: str) -> list[str]:
        return [
            (await queue.requests.submit(request_of(number, owner=owner, model=model), *BOUNDS))[1]
            for number in range(1, count + 1)
        ]

    a, b = await submitted(3, "alice", "a"), await submitted(2, "alice", "b")
    bob = await submitted(2, "bob", "c")
    assert await queue.requests.read(0, 2) == [a[0], bob[0]]
    carol = await submitted(1, "carol", "d")
    order = [a[0], bob[0], a[1], bob[1], carol[0], a[2], *b]
    assert await queue.requests.read(0, 9) == order
    assert await queue.requests.read(3, 9) == order[3:]


async def test_requests_without_an_order_are_open_until_they_are_done(queue: RedisTransferQueue) -> None:
    _, seventh = await queue.requests.submit(request_of(7, ordered=False), *BOUNDS)
    assert await queue.requests.open_requests() == [seventh]
    found = await queue.requests.request(seventh)
    assert found is not None
    assert found.body == b"x"
    await queue.requests.finish(seventh, RequestResult("json", b"1"))
    assert await queue.requests.open_requests() == []
    assert await queue.requests.submit(request_of(7, ordered=False), *BOUNDS) == ("known", seventh)


@pytest.mark.parametrize("functions", [True, False])
async def test_a_full_redis_takes_the_results_of_what_it_has_and_nothing_new(
    queue: RedisTransferQueue, functions: bool
) -> None:
    """Results and trimming end requests, which makes room. A Redis 6.2 gets scripts, not functions."""
    queue._connection._functions = functions
    requests = queue.requests
    _, sample = await requests.submit(request_of(7, ordered=False), *BOUNDS)
    _, first = await requests.submit(request_of(1), *BOUNDS)
    await queue._connection.command("CONFIG", "SET", "maxmemory", 1)
    try:
        queue._connection._deadline_s = 2.0
        with pytest.raises(QueueUnavailable):
            await requests.submit(request_of(2), *BOUNDS)
        assert await requests.read(0, 9) == [first]
        for request_id in (sample, first):
            assert await requests.finish(request_id, RequestResult("json", b"1"), [Record("run", "a", "{}")])
            assert await requests.result(request_id) == RequestResult("json", b"1")
        await requests.trim(1)
        assert await requests.request(first) is None
    finally:
        await queue._connection.command("CONFIG", "SET", "maxmemory", 0)
        queue._connection._deadline_s = CONFIG.deadline_s
    assert (await requests.submit(request_of(2), *BOUNDS))[0] == "new"
