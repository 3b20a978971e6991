"""Tests of sortedcontainers, written for this recipe."""

import pytest
from sortedcontainers import SortedDict, SortedSet


def test_sorted_dict_keeps_order():
    found = SortedDict({"b": 2, "a": 1})
    found["aa"] = 3
    assert list(found) == ["a", "aa", "b"]
    assert list(found.values()) == [1, 3, 2]
    assert list(reversed(found)) == ["b", "aa", "a"]


def test_sorted_dict_by_a_key():
    found = SortedDict(lambda key: -key, {1: "x", 2: "y"})
    assert list(found.items()) == [(2, "y"), (1, "x")]


def test_sorted_dict_assigning_twice_keeps_one():
    found = SortedDict()
    found[1] = "a"
    found[1] = "b"
    assert list(found.items()) == [(1, "b")]
    assert len(found.keys()) == 1


def test_sorted_dict_delete():
    found = SortedDict(a=1, b=2, c=3)
    del found["b"]
    assert list(found) == ["a", "c"]
    with pytest.raises(KeyError):
        del found["b"]


def test_sorted_dict_pop():
    found = SortedDict(a=1, b=2)
    assert found.pop("a") == 1
    assert found.pop("z", 9) == 9
    assert list(found.keys()) == ["b"]
    with pytest.raises(KeyError):
        found.pop("z")


def test_sorted_dict_popitem():
    found = SortedDict(a=1, b=2, c=3)
    assert found.popitem() == ("c", 3)
    assert found.popitem(0) == ("a", 1)
    assert list(found) == ["b"]
    with pytest.raises(KeyError):
        SortedDict().popitem()


def test_sorted_dict_peekitem():
    found = SortedDict(a=1, b=2, c=3)
    assert found.peekitem() == ("c", 3)
    assert found.peekitem(1) == ("b", 2)


def test_sorted_dict_setdefault():
    found = SortedDict(a=1)
    assert found.setdefault("a", 5) == 1
    assert found.setdefault("b", 5) == 5
    assert list(found) == ["a", "b"]


def test_sorted_dict_update():
    found = SortedDict({3: "c"})
    found.update({1: "a", 2: "b"})
    assert list(found.items()) == [(1, "a"), (2, "b"), (3, "c")]


def test_sorted_dict_union():
    found = SortedDict(a=1) | {"b": 2}
    assert dict(found) == {"a": 1, "b": 2}


def test_sorted_dict_views():
    found = SortedDict(a=1, b=2, c=3)
    assert found.keys()[1] == "b"
    assert found.items()[-1] == ("c", 3)
    assert found.values()[0] == 1
    assert found.values()[1:] == [2, 3]


def test_sorted_dict_copy_is_another():
    found = SortedDict(a=1)
    other = found.copy()
    other["b"] = 2
    assert "b" not in found
    assert SortedDict.fromkeys([2, 1], 0) == {1: 0, 2: 0}


def test_sorted_set_holds_each_once():
    found = SortedSet([3, 1, 3, 2])
    found.add(2)
    assert list(found) == [1, 2, 3]
    assert found[1] == 2


def test_sorted_set_discard_and_remove():
    found = SortedSet("abc")
    found.discard("b")
    found.discard("z")
    assert list(found) == ["a", "c"]
    with pytest.raises(KeyError):
        found.remove("z")


def test_sorted_set_pop():
    found = SortedSet([4, 5, 6])
    assert found.pop() == 6
    assert found.pop(0) == 4
    assert list(found) == [5]


def test_sorted_set_algebra():
    left, right = SortedSet([1, 2, 3, 4]), SortedSet([3, 4, 5])
    assert list(left & right) == [3, 4]
    assert list(left | right) == [1, 2, 3, 4, 5]
    assert list(left - right) == [1, 2]
    assert list(left ^ right) == [1, 2, 5]


def test_sorted_set_in_place():
    found = SortedSet([1, 2, 3])
    found -= {2}
    found |= {9}
    found &= {1, 9}
    assert list(found) == [1, 9]
    found.update([5, 7], [6])
    assert list(found) == [1, 5, 6, 7, 9]


def test_sorted_set_delete_a_slice():
    found = SortedSet(range(10))
    del found[2:8]
    assert list(found) == [0, 1, 8, 9]
    assert 5 not in found


def test_sorted_set_compares():
    assert SortedSet([1, 2]) == {2, 1}
    assert SortedSet([1]) < SortedSet([1, 2])
    assert not SortedSet([1, 3]) <= SortedSet([1, 2])
    assert SortedSet([1, 2]).isdisjoint({3})
