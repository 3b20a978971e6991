"""Tests taken out of their file, so that whoever repairs the package does not see them."""

from __future__ import annotations

import ast
from collections.abc import Collection

from penstock.sandbox.swe import Source, first_line, functions
from penstock.sandbox.swe.decoys import Name


def without_tests(data: bytes, names: Collection[Name]) -> bytes | None:
    """The file without these functions; None where one of them is not written in it as a function, or it does not
    parse."""
    try:
        source = Source(data)
    except ValueError:
        return None
    found = {name: function for name, function in functions(source.tree) if name in names}
    if set(found) != set(names):
        return None
    gone = {id(function) for name, function in functions(source.tree) if name in names}
    lines = data.decode().split("\n")
    for body in _bodies(source.tree):
        _blank(lines, body, gone)
    return _without_blank_runs([line for line in lines if line != _GONE]).encode()


_GONE = "\0"


def _bodies(tree: ast.Module) -> list[list[ast.stmt]]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.If | ast.Try)]
    return [body for node in nodes for body in (node.body, getattr(node, "orelse", [])) if body]


def _blank(lines: list[str], body: list[ast.stmt], gone: set[int]) -> None:
    """A body that loses all it has, keeps a ``pass``."""
    taken = [statement for statement in body if id(statement) in gone]
    for statement in taken:
        first, last = first_line(statement), statement.end_lineno or statement.lineno
        lines[first - 1 : last] = [_GONE] * (last - first + 1)
    if taken and len(taken) == len(body) and taken[0].col_offset:
        lines[first_line(taken[0]) - 1] = " " * taken[0].col_offset + "pass"


def _without_blank_runs(lines: list[str]) -> str:
    """At most two empty lines in a row, and one line end at the end."""
    kept: list[str] = []
    for line in lines:
        if line.strip() or kept[-2:] != ["", ""]:
            kept.append(line)
    return "\n".join(kept).rstrip("\n") + "\n"
