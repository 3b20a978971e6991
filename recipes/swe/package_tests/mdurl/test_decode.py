"""Tests of mdurl, written for this recipe."""

import mdurl
import pytest


def test_decode_a_byte():
    assert mdurl.decode("%20x") == " x"


def test_decode_keeps_what_is_reserved():
    assert mdurl.decode("%2Fa%3Fb") == "%2Fa%3Fb"


def test_decode_all_without_exceptions():
    assert mdurl.decode("%2F%3B%23", mdurl.DECODE_COMPONENT_CHARS) == "/;#"


def test_decode_text_without_escapes():
    assert mdurl.decode("abc%") == "abc%"


@pytest.mark.parametrize("text", ["é", "ß", "\u07ff"])
def test_decode_two_bytes(text):
    assert mdurl.decode("".join(f"%{byte:02X}" for byte in text.encode())) == text


@pytest.mark.parametrize("text", ["€", "\u0800", "\uffef"])
def test_decode_three_bytes(text):
    assert mdurl.decode("".join(f"%{byte:02x}" for byte in text.encode()) + "%41") == f"{text}A"


@pytest.mark.parametrize("text", ["😀", "\U00010000"])
def test_decode_four_bytes(text):
    assert mdurl.decode("".join(f"%{byte:02X}" for byte in text.encode())) == text


def test_decode_a_broken_sequence():
    assert mdurl.decode("%C3%41") == "\ufffdA"


def test_decode_an_overlong_sequence():
    assert mdurl.decode("%C0%80") == "\ufffd\ufffd"


def test_decode_a_cut_sequence():
    assert mdurl.decode("%E2%82") == "\ufffd\ufffd"


def test_decode_a_lone_tail():
    assert mdurl.decode("%80%81b") == "\ufffd\ufffdb"


def test_decode_surrogates_are_no_text():
    assert mdurl.decode("%ED%A0%80") == "\ufffd\ufffd\ufffd"
