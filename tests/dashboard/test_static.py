"""The page's own files: complete, from nowhere else, and with no way from text to HTML."""

from __future__ import annotations

import re

import pytest

from penstock.dashboard.app import STATIC

FILES = sorted(file for file in STATIC.iterdir() if not file.name.startswith("uplot."))
"""Ours: uPlot is a library, shipped as it is."""
SINKS = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|setHTML|srcdoc"
    r"|\beval\(|new Function|setTimeout\(\s*[\"'`]|javascript:|//cdn"
)


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_a_file_has_no_sink_and_fetches_nothing_from_elsewhere(file) -> None:
    text = file.read_text()
    assert not SINKS.findall(text)
    assert set(re.findall(r"https?://[^\s\"'`)]+", text)) <= {"http://www.w3.org/2000/svg"}


def test_the_page_loads_every_file_and_has_no_inline_code() -> None:
    index, names = (STATIC / "index.html").read_text(), {path.name for path in STATIC.iterdir()}
    scripts = {name for name in names if name.endswith(".js")}
    loaded = {
        name
        for file in scripts - {"uplot.min.js"}
        for name in re.findall(r'from "\./([\w.]+)"', (STATIC / file).read_text())
    }
    loaded |= set(re.findall(r'/static/([\w.]+)"', index))
    assert scripts <= loaded <= names
    assert "Copyright (c)" in (STATIC / "uplot.LICENSE").read_text()
    assert not re.findall(r"\son\w+=|\sstyle=|<style|<script(?![^>]*src=)", index)
