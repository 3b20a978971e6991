"""Tests taken out of a file: the rest stays a file that runs."""

from __future__ import annotations

from penstock.datasets.swe.factory import without_tests

FILE = b"""\
import pytest

WORDS = ["a"]


@pytest.mark.parametrize(
    "word", WORDS
)
def test_word(word):
    assert word


def helper():
    return 1


class TestBox:
    def test_one(self):
        assert helper() == 1

    def test_two(self):
        assert helper() == 2


if WORDS:

    def test_last():
        assert True
"""


def test_a_function_goes_with_its_decorators():
    left = without_tests(FILE, {("test_word",)})
    assert left is not None
    assert b"test_word" not in left
    assert b"parametrize" not in left
    assert left.startswith(b'import pytest\n\nWORDS = ["a"]\n\n\ndef helper():')


def test_what_is_left_empty_still_parses():
    left = without_tests(FILE, {("TestBox", "test_one"), ("TestBox", "test_two"), ("test_last",)})
    assert left is not None
    compile(left, "file", "exec")
    assert b"class TestBox:\n    pass\n" in left
    assert b"if WORDS:\n\n    pass\n" in left
    one_left = without_tests(FILE, {("TestBox", "test_two")})
    assert one_left is not None
    compile(one_left, "file", "exec")
    assert b"def test_one" in one_left
    assert b"test_two" not in one_left


def test_what_cannot_be_told_apart_is_not_guessed():
    assert without_tests(FILE, {("TestBase", "test_inherited")}) is None
    assert without_tests(b"def broken(:\n", {("test_a",)}) is None
