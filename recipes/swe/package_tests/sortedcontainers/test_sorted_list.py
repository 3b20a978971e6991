"""Tests of sortedcontainers, written for this recipe. Loads are small, so that lists of lists are gone through too."""

import pytest
from sortedcontainers import SortedKeyList, SortedList


def of(values, load=4):
    found = SortedList()
    found._reset(load)
    found.update(values)
    found._check()
    return found


def test_sorted_list_sorts():
    assert list(of([3, 1, 2, 3])) == [1, 2, 3, 3]


def test_sorted_list_add():
    found = of([])
    for value in [5, 1, 9, 3, 7, 2, 8, 4, 6, 0, 5, 5]:
        found.add(value)
        found._check()
    assert list(found) == [0, 1, 2, 3, 4, 5, 5, 5, 6, 7, 8, 9]


def test_sorted_list_update_of_a_full_one():
    found = of(range(0, 20, 2))
    found.update(range(1, 6, 2))
    found._check()
    assert list(found) == [0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 18]


def test_sorted_list_contains():
    found = of(range(0, 40, 2))
    assert 38 in found
    assert 39 not in found
    assert 7 not in found
    assert 1 not in of([])


def test_sorted_list_discard_and_remove():
    found = of(range(12))
    found.discard(5)
    found.discard(99)
    found.remove(11)
    found._check()
    assert list(found) == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
    with pytest.raises(ValueError, match="not in list"):
        found.remove(5)


def test_sorted_list_getitem():
    found = of(range(30))
    assert found[0] == 0
    assert found[17] == 17
    assert found[-1] == 29
    assert found[-13] == 17
    with pytest.raises(IndexError):
        found[30]


def test_sorted_list_slices():
    found = of(range(30))
    assert found[3:9] == [3, 4, 5, 6, 7, 8]
    assert found[::10] == [0, 10, 20]
    assert found[5:2] == []
    assert found[27:] == [27, 28, 29]
    assert found[8:4:-2] == [8, 6]


def test_sorted_list_delete():
    found = of(range(20))
    del found[0]
    del found[-1]
    del found[4:8]
    found._check()
    assert list(found) == [1, 2, 3, 4, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]


def test_sorted_list_pop():
    found = of(range(10))
    assert [found.pop(), found.pop(0), found.pop(3), found.pop(-2)] == [9, 0, 4, 7]
    found._check()
    with pytest.raises(IndexError):
        of([]).pop()


def test_sorted_list_bisect():
    found = of([1, 2, 2, 2, 3, 5, 8, 13])
    assert found.bisect_left(2) == 1
    assert found.bisect_right(2) == 4
    assert found.bisect(6) == 6
    assert found.bisect_left(99) == 8
    assert found.bisect_left(0) == 0


def test_sorted_list_count_and_index():
    found = of([1, 1, 2, 3, 3, 3, 3, 3, 3, 4])
    assert found.count(3) == 6
    assert found.count(7) == 0
    assert found.index(3) == 3
    assert found.index(3, 5) == 5
    with pytest.raises(ValueError, match="not in list"):
        found.index(1, 2)


def test_sorted_list_irange():
    found = of(range(20))
    assert list(found.irange(3, 7)) == [3, 4, 5, 6, 7]
    assert list(found.irange(3, 7, inclusive=(False, False))) == [4, 5, 6]
    assert list(found.irange(16)) == [16, 17, 18, 19]
    assert list(found.irange(None, 2, reverse=True)) == [2, 1, 0]


def test_sorted_list_islice():
    found = of(range(20))
    assert list(found.islice(8, 11)) == [8, 9, 10]
    assert list(found.islice(17)) == [17, 18, 19]
    assert list(found.islice(2, 5, reverse=True)) == [4, 3, 2]


def test_sorted_list_arithmetic():
    assert list(of([1, 3]) + of([2])) == [1, 2, 3]
    assert list(of([1, 2]) * 2) == [1, 1, 2, 2]


def test_sorted_list_compares():
    assert of([1, 2]) == [1, 2]
    assert of([1, 2]) != [1, 2, 3]
    assert of([1, 2]) < [1, 3]
    assert of([2]) >= [2]
    assert not of([1]) > [1, 0]


def test_sorted_list_refuses_places():
    with pytest.raises(NotImplementedError):
        of([1]).append(2)
    with pytest.raises(NotImplementedError):
        of([1])[0] = 2


def test_sorted_key_list():
    found = SortedKeyList([3, -1, 2, -3], key=abs)
    assert list(found) == [-1, 2, 3, -3]
    found.add(0)
    assert found[0] == 0
    assert found.bisect_key_left(3) == 3
    assert list(found.irange_key(1, 2)) == [-1, 2]
    assert -3 in found
    assert 1 not in found
