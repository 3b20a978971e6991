from __future__ import annotations

import random

import pytest

from penstock.common.backoff import Backoff, retry


def test_pauses_grow_to_the_longest_and_reset() -> None:
    pauses = Backoff(0.5, 3.0).pauses()
    assert [pauses.next_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    pauses.reset()
    assert pauses.next_s() == 0.5


def test_pause_of_any_number_of_failures() -> None:
    backoff = Backoff(0.05, 0.2, factor=1.5)
    assert [backoff.pause_s(n) for n in (-1, 0, 1, 2, 10**6)] == pytest.approx([0.05, 0.05, 0.05, 0.075, 0.2])


def test_jitter_stays_in_bounds_and_follows_the_seed() -> None:
    backoff = Backoff(1.0, 8.0, jitter=(0.5, 1.5))
    drawn = [backoff.pause_s(3, rng=random.Random(seed)) for seed in range(50)]
    assert all(2.0 <= pause <= 6.0 for pause in drawn)
    assert len(set(drawn)) > 40
    assert drawn == [backoff.pause_s(3, rng=random.Random(seed)) for seed in range(50)]


@pytest.mark.parametrize(("asked", "pause"), [(None, 1.0), (0.1, 1.0), (5.0, 5.0), (99.0, 8.0)])
def test_pause_honours_what_was_asked(asked: float | None, pause: float) -> None:
    assert Backoff(1.0, 8.0).pause_s(1, at_least_s=asked) == pause


async def test_sleep_ends_with_the_deadline() -> None:
    pauses = Backoff(100.0).pauses()
    assert await pauses.sleep(at_most_s=0.0) == 0.0
    assert await pauses.sleep(at_most_s=-1.0) == 0.0
    assert pauses.failures == 2


@pytest.mark.parametrize(("failures", "calls"), [(0, 1), (2, 3), (3, 3)])
async def test_retry(failures: int, calls: int) -> None:
    made: list[int] = []

    async def work() -> str:
        made.append(1)
        if len(made) <= failures:
            raise OSError(len(made))
        return "done"

    attempt = retry(work, Backoff(0.0), retries=2, on=OSError, at_least_s=lambda error: None)
    if failures > 2:
        with pytest.raises(OSError, match="3"):
            await attempt
    else:
        assert await attempt == "done"
    assert len(made) == calls


async def test_retry_leaves_other_errors() -> None:
    async def work() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await retry(work, Backoff(100.0), retries=2, on=OSError)
