from __future__ import annotations

import asyncio

import pytest

from penstock.sandbox import RunResult, SandboxError, as_call, current_call
from penstock.sandbox.idempotency import IdempotencyCache, request_key


def counting(answer, gate=None):
    done = []

    async def work():
        done.append(1)
        if gate is not None:
            await gate.wait()
        if isinstance(answer, Exception):
            raise answer
        return answer

    return work, done


async def test_cache_returns_the_first_result_while_it_is_computed():
    gate, recorded = asyncio.Event(), IdempotencyCache()
    work, done = counting("first", gate)
    asked = [asyncio.create_task(recorded.once("key", work)) for _ in range(3)]
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*asked) == ["first"] * 3
    assert await recorded.once("key", work) == "first"
    assert len(done) == 1


async def test_cache_work_goes_on_where_whoever_asked_is_gone():
    gate, recorded = asyncio.Event(), IdempotencyCache()
    work, done = counting("told later", gate)
    dead = asyncio.create_task(recorded.once("key", work))
    await asyncio.sleep(0.01)
    dead.cancel()
    await asyncio.gather(dead, return_exceptions=True)
    gate.set()
    assert await recorded.once("key", work) == "told later"
    assert len(done) == 1


async def test_cache_without_a_key_it_is_done_each_time():
    recorded = IdempotencyCache()
    work, done = counting("x")
    assert [await recorded.once(None, work) for _ in range(2)] == ["x", "x"]
    assert len(done) == 2


@pytest.mark.parametrize(("error", "times"), [(FileNotFoundError(2, "gone"), 1), (SandboxError("no room"), 2)])
async def test_cache_files_error_is_an_answer_and_the_sandboxs_is_none(error, times):
    recorded = IdempotencyCache()
    work, done = counting(error)
    for _ in range(2):
        with pytest.raises(type(error)):
            await recorded.once("key", work)
        await asyncio.sleep(0)
    assert len(done) == times


async def test_cache_what_is_kept_no_longer_is_refused_not_done_twice():
    recorded = IdempotencyCache(kept_bytes=100)
    works = [counting(RunResult("x" * 60, "", 0)) for _ in range(3)]
    for number, (work, _) in enumerate(works):
        await recorded.once(f"key {number}", work)
        await asyncio.sleep(0)
    with pytest.raises(SandboxError, match="not done twice"):
        await recorded.once("key 0", works[0][0])
    assert (await recorded.once("key 2", works[2][0])).stdout == "x" * 60
    assert [len(done) for _, done in works] == [1, 1, 1]


async def test_cache_what_is_gone_is_done_again():
    recorded = IdempotencyCache()
    work, done = counting("x")
    await recorded.once("key", work)
    recorded.forget("key")
    await recorded.once("key", work)
    assert len(done) == 2


def keys(*asked):
    with as_call("a call"):
        return [request_key(one) for one in asked]


def test_request_key_covers_call_request_and_count():
    assert request_key(b"x") is None
    assert current_call() is None
    first, second, again = keys(b"x", b"y", b"x")
    assert len({first, second, again}) == 3
    assert sorted(keys(b"y", b"x", b"x")) == sorted([first, second, again])  # whatever the order
    with as_call("another call"):
        assert current_call() == "another call"
        assert request_key(b"x") != first
    with as_call("a call"):
        assert request_key(b"x", b"y") != request_key(b"xy")
