"""Hand-worked numbers for admission and shipping."""

import pytest

from penstock.transfer_queue import enough_members, may_admit, may_ship, places, room_allows


def test_places_are_those_of_open_steps() -> None:
    assert [places(step, 3, 4) for step in (1, 2, 3, 4, 5)] == [0, 0, 4, 8, 12]


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
def test_fresh_workers_fill_exactly_the_steps_within_the_bound(staleness: int) -> None:
    version, per_step, dues = 7, 4, []
    while may_admit(version + staleness, dues, version, per_step):
        dues.append(version + staleness)
    assert len(dues) == (staleness + 1) * per_step


def test_a_worker_that_is_too_far_behind_is_refused() -> None:
    # Version 5, staleness 2: a server at version 2 would have to ship at step 4, which is fixed.
    assert not may_admit(2 + 2, [], 5, 8)
    assert may_admit(3 + 2, [], 5, 8)


def test_an_old_server_takes_only_the_places_that_its_due_leaves() -> None:
    # Steps 5, 6, 7 open with 2 places each. Three groups are due at 7, none before.
    assert may_admit(5, [7, 7, 7], 5, 2)
    assert may_admit(5, [5, 7, 7, 7], 5, 2)
    assert not may_admit(5, [5, 5, 7, 7, 7], 5, 2)
    # Later dues have no place left although step 5 itself has: six groups in six places.
    assert not may_admit(5, [7] * 6, 5, 2)


def test_a_fixed_step_ahead_takes_its_places_away() -> None:
    # Version 5, staleness 0, step 5 already shipped: nothing that is due at 5 may start.
    assert not may_admit(5, [], 6, 8)


def test_shipping_may_overtake_only_groups_that_still_ship_in_time() -> None:
    assert may_ship([], [], 4, 2)
    assert not may_ship([], [4], 4, 2)  # due now
    assert may_ship([], [5, 5], 4, 2)  # both fit into step 5
    assert not may_ship([5, 5], [5], 4, 2)
    assert may_ship([5, 6], [5, 6], 4, 2)
    assert not may_ship([5, 6], [6, 6, 6], 4, 2)
    assert may_ship([4, 5, 5], [6], 4, 2)  # nothing that is due still runs


def test_back_pressure_always_leaves_one_step() -> None:
    assert room_allows(10, 10, 50, 0, 8)
    assert not room_allows(11, 10, 8, 0, 8)
    assert room_allows(11, 10, 7, 0, 8)


def test_small_groups_need_no_more_members_than_they_have() -> None:
    assert enough_members(1, 1, 2)
    assert not enough_members(1, 4, 2)
    assert enough_members(2, 4, 2)
