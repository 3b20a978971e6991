"""Tests of mdurl, written for this recipe."""

import mdurl
import pytest


def test_parse_all_parts():
    url = mdurl.parse("http://user:pass@example.org:8080/a/b?c=d#e")
    assert url.protocol == "http:"
    assert url.slashes is True
    assert url.auth == "user:pass"
    assert url.hostname == "example.org"
    assert url.port == "8080"
    assert url.pathname == "/a/b"
    assert url.search == "?c=d"
    assert url.hash == "#e"


def test_parse_a_path():
    url = mdurl.parse("/a/b?c")
    assert (url.pathname, url.search, url.hostname) == ("/a/b", "?c", None)


def test_parse_a_path_with_a_fragment():
    url = mdurl.parse("/a#b?c")
    assert (url.pathname, url.hash, url.search) == ("/a", "#b?c", None)


def test_parse_trims():
    assert mdurl.parse("  http://a.b/c \n").pathname == "/c"


def test_parse_keeps_the_case_of_the_protocol():
    assert mdurl.parse("HTTP://A.B/C").protocol == "HTTP:"


def test_parse_an_empty_path_of_a_known_protocol():
    assert mdurl.parse("http://example.org?x").pathname == ""
    assert mdurl.parse("http://example.org?x").search == "?x"


def test_parse_a_protocol_without_slashes():
    url = mdurl.parse("mailto:me@example.org")
    assert (url.protocol, url.auth, url.hostname) == ("mailto:", "me", "example.org")
    assert url.slashes is False


def test_parse_javascript_has_no_host():
    url = mdurl.parse("javascript:alert('x')")
    assert (url.hostname, url.pathname) == (None, "alert('x')")


def test_parse_an_at_sign_in_the_path():
    url = mdurl.parse("http://a@b/c@d")
    assert (url.auth, url.hostname, url.pathname) == ("a", "b", "/c@d")


def test_parse_two_at_signs():
    url = mdurl.parse("http://a@b@c/")
    assert (url.auth, url.hostname) == ("a@b", "c")


def test_parse_an_ipv6_address():
    url = mdurl.parse("http://[::1]:80/x")
    assert (url.hostname, url.port, url.pathname) == ("::1", "80", "/x")


def test_parse_a_trailing_colon():
    url = mdurl.parse("http://example.org:/x")
    assert (url.hostname, url.port, url.pathname) == ("example.org", None, ":/x")


def test_parse_a_host_that_is_too_long():
    assert mdurl.parse(f"http://{'a.' * 128}org/x").hostname == ""
    assert mdurl.parse(f"http://{'a.' * 126}org/x").hostname == "a." * 126 + "org"


def test_parse_letters_that_no_host_has():
    url = mdurl.parse("http://ab=c.d/e")
    assert (url.hostname, url.pathname) == ("ab", "=c.d/e")


def test_parse_letters_of_other_alphabets():
    assert mdurl.parse("http://bücher.example/").hostname == "bücher.example"


def test_parse_slashes_as_a_host():
    assert mdurl.parse("//a/b", slashes_denote_host=True).hostname == "a"
    assert mdurl.parse("//a/b").hostname is None


def test_parse_what_is_parsed():
    url = mdurl.parse("http://a/b")
    assert mdurl.parse(url) is url


@pytest.mark.parametrize(
    "text",
    [
        "http://user@example.org:8080/a?b#c",
        "https://[::1]/x",
        "mailto:me@example.org",
        "/just/a/path?q",
        "//host/path",
        "#only",
        "file:///etc/hosts",
    ],
)
def test_format_writes_what_was_parsed(text):
    assert mdurl.format(mdurl.parse(text)) == text
