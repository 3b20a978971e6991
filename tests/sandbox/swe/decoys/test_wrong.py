"""A wrong expectation fails wherever the right one passed, and looks like it."""

from __future__ import annotations

import ast
import random

import pytest

from penstock.sandbox.swe import SweTask
from penstock.sandbox.swe.data_files import STRATEGIES, changed_data
from penstock.sandbox.swe.decoys import certain_rounds
from penstock.sandbox.swe.expectations import apply_all, compared_parameters, open_edits, wrong_tests

TESTS = b"""\
import pytest
from fractions import Fraction

LIMIT = 3


def test_text():
    found = "".join(["a", "b"])
    assert found == "ab"


def test_numbers():
    assert sum([1, 2]) == 3
    assert 10 / 4 == pytest.approx(2.5)


def test_nested():
    assert dict(a=[1, ("x", 2.5)]) == {"a": [1, ("x", 2.5)]}


def test_left():
    assert b"ab" == bytes([97, 98])


def test_turned(words=("a", "b")):
    assert len(words) <= LIMIT


def test_equality(words=("a", "b")):
    assert words == tuple("ab")


def test_named():
    given = 9
    expected = 3
    assert given**0.5 == expected


def test_membership(words=("a", "b")):
    assert "a" in words


def test_truth():
    assert all([1, 1])


def test_not():
    assert not (any([0, 0]))


def test_raises():
    with pytest.raises(ZeroDivisionError):
        1 / 0
    with pytest.raises(ValueError):
        int("x")


class TestInside:
    def test_method(self):
        assert max(4, 7) == 7


class TestCase:
    def assertEqual(self, left, right):
        assert left == right

    def assertIsNone(self, value):
        assert value is None

    def assertIsNotNone(self, value):
        assert value is not None

    def test_equal(self):
        self.assertEqual(str(12), "12")

    def test_none(self):
        self.assertIsNone({}.get("a"))
"""
FUNCTIONS = "text numbers nested left turned equality named membership truth not raises"
METHODS = {("TestInside", "test_method"), ("TestCase", "test_equal"), ("TestCase", "test_none")}
NAMES: set[tuple[str, ...]] = {*((f"test_{name}",) for name in FUNCTIONS.split()), *METHODS}
NEVER = b"""\
import pytest


def test_after_a_return(flag=True):
    if flag:
        return
    assert 1 == 2


@pytest.mark.xfail
def test_expected_to_fail():
    assert 1 == 2


def test_in_a_loop():
    for value in []:
        assert value == 3


def test_yields():
    assert str(1) == "1"
    yield


@pytest.mark.xfail(strict=False)
class TestAll:
    def test_one(self):
        assert str(1) == "1"
"""


def run(data: bytes, name: tuple[str, ...]) -> bool:
    """Whether the test passes."""
    space: dict = {}
    exec(compile(data.decode(), "tests", "exec"), space)
    owner = space[name[0]] if len(name) == 1 else getattr(space[name[0]](), name[1])
    try:
        owner()
    except Exception:  # noqa: BLE001 - as pytest does
        return False
    return True


@pytest.mark.parametrize("seed", range(40))
def test_decoys_fail_exactly_the_changed_test(seed):
    edits = wrong_tests(TESTS, NAMES, random.Random(seed))
    assert set(edits) == NAMES
    for name, edit in edits.items():
        changed = edit.apply(TESTS)
        assert run(TESTS, name)
        assert not run(changed, name), edit
        assert all(run(changed, other) for other in NAMES - {name})
    everything = apply_all(TESTS, list(edits.values()))
    assert not any(run(everything, name) for name in NAMES)


def test_decoys_change_each_of_several_expectations():
    name = ("test_numbers",)
    starts = {wrong_tests(TESTS, {name}, random.Random(seed))[name].start for seed in range(40)}
    assert [chr(TESTS[start]) for start in sorted(starts)] == ["3", "2"]


@pytest.mark.parametrize("seed", range(20))
def test_decoys_changed_literal_keeps_its_form(seed):
    """Nothing but its meaning tells the wrong one: the same length, the same kinds of signs, the same syntax."""
    names = {("test_text",), ("test_numbers",), ("test_nested",), ("test_left",), ("TestCase", "test_equal")}
    for edit in wrong_tests(TESTS, names, random.Random(seed)).values():
        changed = edit.apply(TESTS)
        before, after = TESTS[edit.start : edit.end].decode(), edit.text
        assert len(changed) == len(TESTS)
        assert (before.isdigit(), before.islower(), before.isupper()) == (
            after.isdigit(),
            after.islower(),
            after.isupper(),
        )
        shapes = [[type(node).__name__ for node in ast.walk(ast.parse(data))] for data in (TESTS, changed)]
        assert shapes[0] == shapes[1]


def test_decoys_skip_assertions_that_may_not_be_reached():
    names = {("test_after_a_return",), ("test_in_a_loop",), ("test_yields",), ("test_expected_to_fail",)}
    assert wrong_tests(NEVER, names, random.Random(0)) == {}
    without_class = NEVER.partition(b"@pytest.mark.xfail(strict")[0]
    assert wrong_tests(without_class, names, random.Random(0)) == {}


@pytest.mark.parametrize("data", [b"def broken(:\n", b"a = 1\r\n", b"\xff\xfe"])
def test_decoys_skip_what_is_no_plain_python(data):
    assert wrong_tests(data, {("test_a",)}, random.Random(0)) == {}


MANY = b"""\
import pytest

LIMIT = 30
ROWS = [("a", 10), pytest.param("b", 20)]


@pytest.mark.parametrize("text, expected", ROWS)
def test_rows(text, expected):
    found = work(text)
    assert found == expected


@pytest.mark.parametrize("given", [1])
def test_limit(given):
    assert work(given) == LIMIT
"""


def test_decoys_open_edits_change_expected_values_alone():
    names = {("test_rows",), ("test_limit",)}
    assert compared_parameters(MANY, names) == {("test_rows",): ("expected",)}
    changed = apply_all(MANY, open_edits(MANY, names, random.Random(1), 1.0)).decode()
    for kept in ('("a", ', 'pytest.param("b", ', '"given", [1]'):
        assert kept in changed
    for value in ("10)", "20)", "= 30"):
        assert value not in changed


@pytest.mark.parametrize(
    ("text", "kept"),
    [('[[1, 2], "ab"]\n', "[[1, 2], "), ('{"in": 5, "expected": 7}\n', '{"in": 5, "expected": '), ("a,b,12\n", "a,b,")],
)
def test_data_files_last_values_change_in_form(text, kept):
    changed = changed_data({"d": text.encode()}, STRATEGIES[1], random.Random(0), 1.0)["d"].decode()
    assert changed.startswith(kept)
    assert changed != text
    assert [sign.isdigit() for sign in changed] == [sign.isdigit() for sign in text]


@pytest.mark.parametrize(("functions", "versions"), [(1, 4), (2, 1)])
def test_decoys_have_the_same_wrong_versions_in_each_grading(functions, versions):
    """The right version would be the one that is seen again, where a patch carries what it saw to later gradings."""
    text = "".join(f"def test_{at}():\n    assert work({at}) == 'a long text of its own'\n" for at in range(functions))
    tests = tuple(f"tests/test_a.py::test_{at}" for at in range(functions))
    task, files = SweTask("many", tests), {"tests/test_a.py": text.encode()}
    gradings = [certain_rounds(task, files, 4) for _ in range(3)]
    seen = [
        {one.changes.files["tests/test_a.py"].splitlines()[1] for one in rounds if tests[0] in one.wrong}
        for rounds in gradings
    ]
    assert [len(some) for some in seen] == 3 * [versions]
    assert seen[0] == seen[1] == seen[2]
    assert functions > 1 or all(one.wrong == tests for rounds in gradings for one in rounds)
