"""Which boxes are handed out, and how many there are, whatever is asked for in whatever order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.until import until

from penstock.sandbox import SandboxError
from penstock.sandbox.bwrap.sandbox import BwrapSandbox
from penstock.sandbox.protocol import SandboxBusy
from penstock.sandbox.server.pool import BoxPool
from penstock.testing import FakeSandbox, FakeSession


@pytest.fixture
def fake() -> FakeSandbox:
    return FakeSandbox()


@pytest_asyncio.fixture
async def pool(fake: FakeSandbox) -> AsyncIterator[BoxPool]:
    made = BoxPool(fake, 4, {None: 2})
    made.start()
    await full(made, 2)
    yield made
    await made.stop()
    assert not fake.living


async def full(pool: BoxPool, count: int) -> None:
    await until(lambda: pool.warm == count)


async def test_pool_taken_box_is_a_warm_one_and_is_replaced(pool: BoxPool, fake: FakeSandbox) -> None:
    first = await pool.take("a", None, 1.0)
    assert first.session_id in ("box-1", "box-2")
    await full(pool, 2)
    assert (fake.started, pool.counts["taken_warm"]) == (3, 1)
    await pool.give_back(first)


async def test_pool_never_exceeds_max_boxes_and_prefers_requests(pool: BoxPool, fake: FakeSandbox) -> None:
    taken = [await pool.take("a", None, 1.0) for _ in range(4)]
    assert fake.most == 4
    assert pool.warm == 0
    with pytest.raises(SandboxBusy, match=r"all 4 boxes were in use; waited \d+\.\d s"):
        await pool.take("a", None, 0.02)
    waiting = asyncio.create_task(pool.take("b", None, 5.0))
    await asyncio.sleep(0)
    await pool.give_back(taken.pop())
    taken.append(await waiting)
    assert fake.most == 4
    for session in taken:
        await pool.give_back(session)
    await full(pool, 2)


async def test_pool_dead_warm_box_is_never_handed_out(pool: BoxPool, fake: FakeSandbox) -> None:
    for session in fake.living:
        session.dead = True
    taken = await pool.take("a", None, 1.0)
    assert (await taken.run(["x"])).stdout == "x"
    assert pool.counts["stale"] == 2
    await pool.give_back(taken)


async def test_pool_warm_box_is_given_up_for_another_image(pool: BoxPool, fake: FakeSandbox) -> None:
    taken = [await pool.take("a", "other", 1.0) for _ in range(4)]
    assert {session.image for session in fake.living} == {"other"}
    assert (fake.most, pool.warm, pool.counts["given_up"]) == (4, 0, 2)
    for session in taken:
        await pool.give_back(session)


async def test_pool_who_comes_while_only_slot_is_being_warmed_gets_it(fake: FakeSandbox) -> None:
    fake.start_s = 0.05
    pool = BoxPool(fake, 1, {None: 1})
    pool.start()
    await asyncio.sleep(0.01)
    taken = await pool.take("a", None, 5.0)
    assert fake.most == 1
    await pool.give_back(taken)
    await pool.stop()


async def test_pool_starts_that_fail_cost_no_slot_and_warming_goes_on(fake: FakeSandbox) -> None:
    fake.failures = 2
    pool = BoxPool(fake, 1, {})
    pool.start()
    for _ in range(2):
        with pytest.raises(SandboxError, match="no box today"):
            await pool.take("a", None, 0.1)
    await pool.give_back(await pool.take("a", None, 0.1))
    await pool.stop()
    fake.failures = 1
    warming = BoxPool(fake, 2, {None: 2})
    warming.start()
    await full(warming, 2)
    await warming.stop()


async def test_pool_warms_other_images_after_one_fails(fake: FakeSandbox) -> None:
    fake.broken_images = {"typo"}
    pool = BoxPool(fake, 4, {"typo": 1, "good": 2})
    pool.start()
    await full(pool, 2)
    assert {session.image for session in fake.living} == {"good"}
    await pool.stop()
    assert (fake.living, pool.slots.free) == (set(), 4)


async def test_pool_request_that_is_cancelled_gives_its_slot_on(fake: FakeSandbox) -> None:
    pool = BoxPool(fake, 1, {})
    held = await pool.take("a", None, 1.0)
    first, second = (asyncio.create_task(pool.take(name, None, 5.0)) for name in "bc")
    await asyncio.sleep(0)
    giving = asyncio.create_task(pool.give_back(held))
    for _ in range(6):  # at whichever moment it leaves
        await asyncio.sleep(0)
    first.cancel()
    await giving
    outcome = (await asyncio.gather(first, return_exceptions=True))[0]
    if isinstance(outcome, FakeSession):
        await pool.give_back(outcome)
    assert (await second).session_id
    assert fake.most == 1


Step = st.tuples(st.sampled_from(["take", "back", "die", "fail", "cancel", "wait"]), st.integers(0, 3))


@settings(max_examples=60)
@given(steps=st.lists(Step, max_size=40))
def test_pool_random_requests_neither_lose_nor_share_slots(steps: list[tuple[str, int]]) -> None:
    asyncio.run(act(steps))


async def act(steps: list[tuple[str, int]]) -> None:
    fake = FakeSandbox()
    pool = BoxPool(fake, 3, {None: 1, "a": 1})
    pool.start()
    tasks: list[asyncio.Task[FakeSession]] = []
    for what, number in steps:
        await step(fake, pool, tasks, what, number)
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, FakeSession):
            await pool.give_back(outcome)
    await pool.stop()
    assert fake.most <= 3
    assert not fake.living
    assert (pool.slots.free, pool.slots.waiting) == (3, 0)


async def step(
    fake: FakeSandbox, pool: BoxPool, tasks: list[asyncio.Task[FakeSession]], what: str, number: int
) -> None:
    if what == "take":
        tasks.append(asyncio.create_task(pool.take("x", (None, "a", "b", "c")[number], 0.01)))  # type: ignore[arg-type]
    elif what == "die":
        for session in list(fake.living)[:number]:
            session.dead = True
    elif what == "fail":
        fake.failures = number
    elif what == "cancel" and number < len(tasks):
        tasks[number].cancel()
    elif what == "back":
        done = [task for task in tasks if task.done() and not task.cancelled() and not task.exception()]
        for task in done[:1]:
            tasks.remove(task)
            await pool.give_back(task.result())
    elif what == "wait":
        await asyncio.sleep(0.005 * number)


@pytest.mark.bwrap
async def test_pool_real_box_that_died_in_the_pool_is_replaced(sandbox: BwrapSandbox) -> None:
    pool = BoxPool(sandbox, 2, {None: 1})
    pool.start()
    await full(pool, 1)
    session = pool._warm[None][0]
    session._box._process.kill()  # type: ignore[attr-defined]
    await until(lambda: session._box._process.poll() is not None)  # type: ignore[attr-defined]  # before it is probed
    taken = await pool.take("a", None, 5.0)
    assert taken is not session
    assert (await taken.run_python("1 + 1")).stdout == "2\n"
    await pool.give_back(taken)
    await pool.stop()
    assert pool.counts["stale"] == 1
