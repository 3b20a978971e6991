"""A fetch may last as long as its file is large; one that stalls, or waits for ever, is given up soon."""

from __future__ import annotations

import pytest
from tests.virtual_clock import VirtualClock

from penstock.weight_sync.http.progress import FetchProgress

MIB = 1 << 20
WAITED = "waited"
CASES = {
    "nothing comes": (10_000 * MIB, 5 * MIB, [(20, 5 * MIB), (10, None)], 1),
    "a trickle": (10_000 * MIB, 0, [(7, have) for have in range(1, 5)], 3),
    "the end of a file needs no more than what is missing": (100, 0, [(29, 100), (29, None)], 2),
    "wrong bytes begin anew": (10 * MIB, 9 * MIB, [(29, 0), (29, None)], 2),
    "a turn is waited for as long as the file takes at 1 MB/s": (100_000_000, 0, [(130, WAITED)], 1),
    "a turn is waited for in pieces": (100_000_000, 0, [(13, WAITED)] * 10, 1),
}


@pytest.mark.parametrize(("size", "have", "steps", "more_s"), CASES.values(), ids=CASES)
def test_fetch_goes_on_until_its_time_has_gone(
    size: int, have: int, steps: list[tuple[int, int | str | None]], more_s: int
) -> None:
    """Each step: seconds later, so many bytes are here, or it was told to wait. `more_s` later it is given up."""
    clock = VirtualClock(100.0)
    progress = FetchProgress(size, have, 30, clock)
    for seconds, what in steps:
        clock.now += seconds
        if what == WAITED:
            progress.waited()
        elif isinstance(what, int):
            progress.note(what)
        assert progress.problem() == ""
    waits = steps[-1][1] == WAITED
    assert waits or "not done in time" in progress.problem(pause_s=more_s)
    clock.now += more_s
    if waits:
        progress.waited()
    assert ("turn" if waits else "not done in time") in progress.problem()


def test_slow_fetch_that_advances_is_never_given_up() -> None:
    clock = VirtualClock(100.0)
    progress = FetchProgress(10_000 * MIB, 0, 30, clock)
    for have in range(MIB, 10_001 * MIB, MIB):
        clock.now += 25
        assert progress.problem() == ""
        progress.note(have)
    assert clock.now > 2 * 86_400


@pytest.mark.parametrize(("have", "least"), [(0, MIB), (3 * MIB, 40)], ids=["middle", "end"])
def test_stall_names_what_was_missing(have: int, least: int) -> None:
    clock = VirtualClock(100.0)
    progress = FetchProgress(3 * MIB + 40, have, 30, clock)
    clock.now += 31
    assert progress.problem() == f"not done in time: less than {least} bytes came in 30 s"
