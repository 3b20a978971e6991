"""Tests of mdurl, written for this recipe."""

import mdurl


def test_encode_a_space():
    assert mdurl.encode("a b") == "a%20b"


def test_encode_leaves_letters_and_digits():
    assert mdurl.encode("azAZ09") == "azAZ09"


def test_encode_leaves_what_is_reserved():
    assert mdurl.encode(";/?:@&=+$,-_.!~*'()#") == ";/?:@&=+$,-_.!~*'()#"


def test_encode_component():
    assert mdurl.encode("a/b?c", mdurl.ENCODE_COMPONENT_CHARS) == "a%2Fb%3Fc"


def test_encode_control_characters_with_two_digits():
    assert mdurl.encode("\n\t\x7f") == "%0A%09%7F"


def test_encode_keeps_an_escape():
    assert mdurl.encode("%20%zz") == "%20%25zz"


def test_encode_keeps_an_escape_at_the_end():
    assert mdurl.encode("a%2f") == "a%2f"


def test_encode_a_percent_at_the_end():
    assert mdurl.encode("100%") == "100%25"
    assert mdurl.encode("100%2") == "100%252"


def test_encode_escapes_escapes_when_told_to():
    assert mdurl.encode("%20", keep_escaped=False) == "%2520"


def test_encode_other_letters():
    assert mdurl.encode("é€") == "%C3%A9%E2%82%AC"


def test_encode_a_lone_surrogate():
    assert mdurl.encode("\ud800x") == "%EF%BF%BDx"
    assert mdurl.encode("\udfffx") == "%EF%BF%BDx"


def test_encode_twice_with_the_same_exceptions():
    assert [mdurl.encode("a^b", "^"), mdurl.encode("a^b", "^"), mdurl.encode("a^b", "")] == ["a^b", "a^b", "a%5Eb"]
