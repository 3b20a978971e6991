"""Changes of expressions: each yields the edits that it knows for one node."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from penstock.sandbox.swe import Edit, Source

MAX_OFF_BY_ONE = 1000
_COMPARISONS: Mapping[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
}
_ARITHMETIC: Mapping[type[ast.operator], tuple[str, str]] = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: (r"\|", "&"),
}
_FUNCTIONS = {
    **{"min": "max", "any": "all", "startswith": "endswith", "lower": "upper", "lstrip": "rstrip", "find": "rfind"},
    **{
        "append": "extend",
        "partition": "rpartition",
        "index": "rindex",
        "ljust": "rjust",
        "bisect_left": "bisect_right",
    },
}
_OTHERS = {**_FUNCTIONS, **{right: left for left, right in _FUNCTIONS.items()}}


def comparison(node: ast.AST, source: Source) -> Iterator[Edit]:
    """``<`` for ``<=``, ``==`` for ``!=``, ``in`` for ``not in``, …"""
    if not isinstance(node, ast.Compare):
        return
    sides = [node.left, *node.comparators]
    for left, operator, right in zip(sides[:-1], node.ops, sides[1:], strict=True):
        yield from _operator(source, left, right, *_COMPARISONS[type(operator)])


def arithmetic(node: ast.AST, source: Source) -> Iterator[Edit]:
    """``-`` for ``+``, ``//`` for ``*``, …; not of texts, where any mistake is a TypeError."""
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not _is_text(node.left, node.right):
        yield from _operator(source, node.left, node.right, *_ARITHMETIC[type(node.op)])


def boolean(node: ast.AST, source: Source) -> Iterator[Edit]:
    """``or`` for the first ``and``, and the other way round."""
    if isinstance(node, ast.BoolOp):
        word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        yield from _operator(source, node.values[0], node.values[1], word, other)


def negation(node: ast.AST, source: Source) -> Iterator[Edit]:
    """A ``not`` forgotten."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        start, _ = source.span(node)
        match = re.match(rb"not\s*", source.data[start:])
        if match:
            yield Edit(start, start + match.end(), "")


def off_by_one(node: ast.AST, source: Source) -> Iterator[Edit]:
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= MAX_OFF_BY_ONE:
        text = source.text(node)
        if text.isdigit():
            others = [node.value + 1, *([node.value - 1] if node.value else [])]
            yield from (Edit(*source.span(node), str(other)) for other in others)


def swapped_arguments(node: ast.AST, source: Source) -> Iterator[Edit]:
    """The first two of a call."""
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return
    first, second = node.args[:2]
    if isinstance(first, ast.Starred) or isinstance(second, ast.Starred) or source.text(first) == source.text(second):
        return
    _, between = source.between(first, second)
    swapped = source.text(second) + between + source.text(first)
    yield Edit(source.span(first)[0], source.span(second)[1], swapped)


def wrong_function(node: ast.AST, source: Source) -> Iterator[Edit]:
    """``max`` for ``min``, ``endswith`` for ``startswith``, …"""
    if not isinstance(node, ast.Call):
        return
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    if name in _OTHERS:
        end = source.span(node.func)[1]
        yield Edit(end - len(name), end, _OTHERS[name])


def _operator(source: Source, left: ast.AST, right: ast.AST, pattern: str, other: str) -> Iterator[Edit]:
    """The operator stands between its operands, with nothing but brackets and white space beside it."""
    start, gap = source.between(left, right)
    match = re.fullmatch(rf"([\s()]*)({pattern})([\s()]*)", gap)
    if match:
        yield Edit(start + match.start(2), start + match.end(2), other)


def _is_text(*nodes: ast.AST) -> bool:
    return any(
        isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
        for node in nodes
    )
