"""The page's own files: complete, from nowhere else, and with no way from text to HTML."""

from __future__ import annotations

import re

import pytest

from penstock.dashboard.app import STATIC

SCRIPTS = sorted(STATIC.glob("*.js"))
SINKS = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|setHTML|srcdoc"
    r"|\beval\(|new Function|setTimeout\(\s*[\"'`]|javascript:"
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_text_never_reaches_the_html_parser(script) -> None:
    assert not SINKS.findall(script.read_text())


@pytest.mark.parametrize("file", sorted(STATIC.iterdir()), ids=lambda path: path.name)
def test_nothing_is_fetched_from_elsewhere(file) -> None:
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", file.read_text()))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert "//cdn" not in file.read_text()


def test_every_import_and_link_is_there() -> None:
    named = {name for script in SCRIPTS for name in re.findall(r'from "\./([\w.]+)"', script.read_text())}
    named |= set(re.findall(r'/static/([\w.]+)"', (STATIC / "index.html").read_text()))
    assert named <= {path.name for path in STATIC.iterdir()}
    assert {path.name for path in SCRIPTS} <= named


def test_the_page_itself_has_no_inline_code_or_style() -> None:
    text = (STATIC / "index.html").read_text()
    assert not re.findall(r"\son\w+=|\sstyle=|<style|<script(?![^>]*src=)", text)
