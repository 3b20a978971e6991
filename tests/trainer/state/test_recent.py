"""What a checkpoint remembers of the latest steps."""

from __future__ import annotations

from tests.virtual_clock import VirtualClock

from penstock.trainer.state.checkpoint import RecentBatches


def test_steps_are_remembered_until_long_after_their_commit() -> None:
    clock = VirtualClock()
    recent = RecentBatches(keep_s=60.0, clock=clock)
    for step in range(4):
        recent.add(step, [[f"{step}#0"]])
    assert recent.below(3) == {0: [["0#0"]], 1: [["1#0"]], 2: [["2#0"]]}
    recent.committed(3)
    clock.now = 59.9
    assert sorted(recent.below(4)) == [0, 1, 2, 3]
    clock.now = 60.0
    assert sorted(recent.below(4)) == [3]
    clock.now = 1000.0
    assert sorted(recent.below(4)) == [3]


def test_each_commit_has_its_own_time() -> None:
    clock = VirtualClock()
    recent = RecentBatches(keep_s=10.0, clock=clock)
    recent.update({4: [["4#0"]], 5: [["5#0"]]})
    recent.add(6, [["6#0"]])
    recent.committed(5)
    clock.now = 6.0
    recent.committed(6)
    clock.now = 11.0
    assert sorted(recent.below(7)) == [5, 6]
    clock.now = 16.0
    assert sorted(recent.below(7)) == [6]


def test_a_step_that_is_trained_again_counts_as_it_was_last() -> None:
    recent = RecentBatches()
    recent.update({1: [["old#0"]]})
    recent.add(1, [["new#0"]])
    assert recent.below(2) == {1: [["new#0"]]}
