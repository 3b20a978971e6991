"""Processor sharing, event by event."""

from __future__ import annotations

import pytest

from penstock.simulator import StuckSimulation
from penstock.simulator.stage import Clock, Host, Stage


def ends(clock: Clock, stage: Stage, works: list[float]) -> dict[float, float]:
    found: dict[float, float] = {}
    for work in works:
        stage.submit(work, lambda job: found.update({job.work: clock.now_s}))
    clock.run(lambda: len(found) == len(works))
    return found


def test_jobs_share_speed_and_speed_up_as_others_end() -> None:
    """Two jobs at half speed: the short one ends at 2·2 s, the long one has 4 left, alone at full speed."""
    clock = Clock()
    assert ends(clock, Stage(clock, lambda n: 1 / n, 8), [2.0, 6.0]) == {2.0: 4.0, 6.0: 8.0}


def test_over_capacity_jobs_wait_in_order() -> None:
    clock = Clock()
    assert ends(clock, Stage(clock, lambda _: 1.0, 1), [3.0, 1.0, 2.0]) == {3.0: 3.0, 1.0: 4.0, 2.0: 6.0}


def test_a_pause_delays_by_its_length() -> None:
    clock = Clock()
    stage = Stage(clock, lambda _: 1.0, 1)
    clock.after(1.0, stage.pause)
    clock.after(4.0, stage.resume)
    assert ends(clock, stage, [2.0]) == {2.0: 5.0}


def test_stages_of_a_host_slow_each_other_down_only_while_both_work() -> None:
    clock = Clock()
    host = Host(clock, cores=1)
    first, second = (Stage(clock, lambda _: 1.0, 4, host) for _ in range(2))
    found: dict[str, float] = {}
    first.submit(1.0, lambda _: found.update(first=clock.now_s))
    second.submit(3.0, lambda _: found.update(second=clock.now_s))
    clock.run(lambda: len(found) == 2)
    assert found == {"first": pytest.approx(2.0), "second": pytest.approx(4.0)}
    assert first.work_done + second.work_done == pytest.approx(4.0)


def test_a_simulation_in_which_nothing_can_happen_says_so() -> None:
    with pytest.raises(StuckSimulation, match=r"nothing more happens after 0\.0 s"):
        Clock().run(lambda: False)
