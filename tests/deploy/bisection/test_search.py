"""Delta debugging finds the items that are to blame, whatever the oracle, and keeps to its tries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from penstock.deploy.bisection.search import OutOfTries, smallest_set

Oracle = Callable[[Sequence[int]], bool]


def of_culprits(culprits: set[int]) -> Oracle:
    """The fault is undone if all of them are removed."""
    return lambda removed: culprits <= set(removed)


@given(st.data(), st.integers(1, 40))
def test_smallest_set_is_the_culprits_wherever_they_are(data: st.DataObject, size: int) -> None:
    culprits = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    result = smallest_set(range(size), of_culprits(culprits))
    assert (set(result.items), result.is_minimal) == (culprits, True)


@given(st.integers(1, 200), st.data())
def test_one_culprit_takes_two_tries_per_halving(size: int, data: st.DataObject) -> None:
    culprit, tries = data.draw(st.integers(0, size - 1)), count()

    def undoes(removed: Sequence[int]) -> bool:
        next(tries)
        return culprit in removed

    assert smallest_set(range(size), undoes).items == (culprit,)
    assert next(tries) <= 2 * (size - 1).bit_length()


@given(st.integers(1, 12), st.randoms(use_true_random=False))
def test_any_oracle_gets_a_set_of_which_each_item_is_needed(size: int, random: object) -> None:
    """A replay is no monotone function of what it leaves out."""
    answers: dict[frozenset[int], bool] = {frozenset(range(size)): True}

    def undoes(removed: Sequence[int]) -> bool:
        assert removed
        return answers.setdefault(frozenset(removed), random.random() < 0.3)  # type: ignore[attr-defined]

    result = smallest_set(range(size), undoes)
    assert answers[frozenset(result.items)]
    assert result.is_minimal
    for item in result.items:
        rest = frozenset(result.items) - {item}
        assert not rest or not answers[rest]


@given(st.sets(st.integers(0, 30), min_size=1), st.integers(0, 12))
def test_used_up_tries_leave_a_set_that_undoes_the_fault(culprits: set[int], most: int) -> None:
    tries = count(1)

    def undoes(removed: Sequence[int]) -> bool:
        if next(tries) > most:
            raise OutOfTries
        return culprits <= set(removed)

    result = smallest_set(range(31), undoes)
    assert culprits <= set(result.items)
    assert result.is_minimal or next(tries) == most + 2
