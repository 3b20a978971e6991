"""Changes of statements: branches and lines forgotten, conditions turned round, other results."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from penstock.sandbox.swe import Edit, Source

_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def wrong_condition(node: ast.AST, source: Source) -> Iterator[Edit]:
    """The opposite of an ``if``'s or ``while``'s."""
    if isinstance(node, ast.If | ast.While) and not _is_not(node.test):
        text = source.text(node.test)
        simple = isinstance(node.test, ast.Name | ast.Call | ast.Attribute | ast.Subscript)
        yield Edit(*source.span(node.test), f"not {text}" if simple else f"not ({text})")


def removed_branch(node: ast.AST, source: Source) -> Iterator[Edit]:
    """An ``if`` that leaves the function or the loop, forgotten."""
    for statement in _spare(node):
        if isinstance(statement, ast.If) and not statement.orelse and isinstance(statement.body[-1], _LEAVES):
            yield from _without(statement, source)


def removed_statement(node: ast.AST, source: Source) -> Iterator[Edit]:
    """A call for its effect, or a change of a variable, forgotten."""
    for statement in _spare(node):
        is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        if is_call or isinstance(statement, ast.AugAssign):
            yield from _without(statement, source)


def wrong_return(node: ast.AST, source: Source) -> Iterator[Edit]:
    """True for False, a pair turned round, or nothing."""
    if not isinstance(node, ast.Return) or node.value is None:
        return
    value, span = node.value, source.span(node.value)
    if isinstance(value, ast.Constant):
        if isinstance(value.value, bool):
            yield Edit(*span, str(not value.value))
    elif isinstance(value, ast.Tuple) and len(value.elts) == 2 and not any(_is_starred(one) for one in value.elts):
        first, second = value.elts
        _, between = source.between(first, second)
        swapped = source.text(second) + between + source.text(first)
        yield Edit(source.span(first)[0], source.span(second)[1], swapped)
    else:
        yield Edit(*span, "None")


def _spare(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements of a body that is not empty without one of them."""
    for name in ("body", "orelse", "finalbody"):
        body = getattr(node, name, None)
        if isinstance(body, list) and len(body) > 1:
            yield from body


def _without(statement: ast.stmt, source: Source) -> Iterator[Edit]:
    """Nothing where others share its lines."""
    start, end = source.lines(statement.lineno, statement.end_lineno or statement.lineno)
    before, after = source.span(statement)
    rest = source.data[after:end].strip()
    if not source.data[start:before].strip() and (not rest or rest.startswith(b"#")):
        yield Edit(start, end, "")


def _is_not(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _is_starred(node: ast.AST) -> bool:
    return isinstance(node, ast.Starred)
