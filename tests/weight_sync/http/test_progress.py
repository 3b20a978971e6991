"""A fetch may last as long as its file is large; one that stalls, or waits for ever, is given up soon."""

from __future__ import annotations

import pytest
from tests.virtual_clock import VirtualClock

from penstock.weight_sync.http.progress import FetchProgress

MIB = 1 << 20


def test_a_slow_fetch_that_advances_is_never_given_up() -> None:
    clock = VirtualClock(100.0)
    progress, have = FetchProgress(10_000 * MIB, 0, 30, clock), 0
    while have < 10_000 * MIB:
        clock.now += 25
        have += MIB
        assert progress.problem() == ""
        progress.note(have)
    assert clock.now > 2 * 86_400


def test_a_fetch_that_brings_nothing_is_given_up_after_the_stall_time() -> None:
    clock = VirtualClock(100.0)
    progress = FetchProgress(10_000 * MIB, 5 * MIB, 30, clock)
    clock.now += 20
    progress.note(5 * MIB)
    clock.now += 10
    assert progress.problem() == ""
    assert "not done in time" in progress.problem(pause_s=1)
    clock.now += 1
    assert "not done in time" in progress.problem()


def test_a_trickle_is_a_stall() -> None:
    clock = VirtualClock(100.0)
    progress = FetchProgress(10_000 * MIB, 0, 30, clock)
    for have in range(1, 5):
        clock.now += 7
        progress.note(have)
        assert progress.problem() == ""
    clock.now += 3
    assert progress.problem()


def test_the_end_of_a_file_needs_no_more_than_what_is_missing() -> None:
    clock = VirtualClock(100.0)
    progress = FetchProgress(100, 0, 30, clock)
    clock.now += 29
    progress.note(100)
    clock.now += 29
    assert progress.problem() == ""


def test_bytes_that_were_wrong_and_begin_anew_are_a_new_beginning() -> None:
    clock = VirtualClock(100.0)
    progress = FetchProgress(10 * MIB, 9 * MIB, 30, clock)
    clock.now += 29
    progress.note(0)
    clock.now += 29
    assert progress.problem() == ""


def test_waiting_for_a_turn_is_no_stall_and_has_an_end() -> None:
    clock = VirtualClock(100.0)
    progress, waited = FetchProgress(100_000_000, 0, 30, clock), 0.0
    while not progress.problem():
        clock.now += 0.1
        progress.waited()
        waited += 0.1
    assert 129 < waited < 132
    assert "turn" in progress.problem()


@pytest.mark.parametrize(("have", "least"), [(0, MIB), (3 * MIB, 40)], ids=["middle", "end"])
def test_a_stall_names_what_was_missing(have: int, least: int) -> None:
    clock = VirtualClock(100.0)
    progress = FetchProgress(3 * MIB + 40, have, 30, clock)
    clock.now += 31
    assert progress.problem() == f"not done in time: less than {least} bytes came in 30 s"


def test_a_turn_may_be_waited_for_until_its_time_has_gone() -> None:
    """30 s, and the file at 1 MB/s."""
    clock = VirtualClock(100.0)
    progress = FetchProgress(100_000_000, 0, 30, clock)
    clock.now += 130
    progress.waited()
    assert progress.problem() == ""
    clock.now += 1
    progress.waited()
    assert "turn" in progress.problem()
