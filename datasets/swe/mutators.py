"""Mistakes as people make them: one small change to a function's text, the rest as its author wrote it.

Mutation libraries (mutmut, cosmic-ray) are whole test runners with state; here only the list of changes is needed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from penstock.sandbox.swe import Edit, Source, functions

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
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= 1000:
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
    yield _turned_round(first, second, source)


def wrong_function(node: ast.AST, source: Source) -> Iterator[Edit]:
    """``max`` for ``min``, ``endswith`` for ``startswith``, …"""
    if not isinstance(node, ast.Call):
        return
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    if name in _OTHERS:
        end = source.span(node.func)[1]
        yield Edit(end - len(name), end, _OTHERS[name])


def _operator(source: Source, left: ast.AST, right: ast.AST, pattern: str, other: str) -> Iterator[Edit]:
    """The operator stands between its operands, with nothing but brackets and white space around it."""
    start, gap = source.between(left, right)
    match = re.fullmatch(rf"([\s()]*)({pattern})([\s()]*)", gap)
    if match:
        yield Edit(start + match.start(2), start + match.end(2), other)


def _turned_round(first: ast.expr, second: ast.expr, source: Source) -> Edit:
    _, between = source.between(first, second)
    return Edit(source.span(first)[0], source.span(second)[1], source.text(second) + between + source.text(first))


def _is_text(*nodes: ast.AST) -> bool:
    return any(
        isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
        for node in nodes
    )


def wrong_condition(node: ast.AST, source: Source) -> Iterator[Edit]:
    """The opposite of an ``if``'s or ``while``'s."""
    if not isinstance(node, ast.If | ast.While):
        return
    if not (isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)):
        text = source.text(node.test)
        simple = isinstance(node.test, ast.Name | ast.Call | ast.Attribute | ast.Subscript)
        yield Edit(*source.span(node.test), f"not {text}" if simple else f"not ({text})")


def removed_branch(node: ast.AST, source: Source) -> Iterator[Edit]:
    """An ``if`` that leaves the function or the loop, forgotten."""
    for statement in _spare(node):
        leaves = (ast.Return, ast.Raise, ast.Continue, ast.Break)
        if isinstance(statement, ast.If) and not statement.orelse and isinstance(statement.body[-1], leaves):
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
    elif (
        isinstance(value, ast.Tuple)
        and len(value.elts) == 2
        and not any(isinstance(one, ast.Starred) for one in value.elts)
    ):
        yield _turned_round(value.elts[0], value.elts[1], source)
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


Mutator = Callable[[ast.AST, Source], Iterator[Edit]]
MUTATORS: Mapping[str, Mutator] = {
    "comparison": comparison,
    "arithmetic": arithmetic,
    "boolean": boolean,
    "negation": negation,
    "off by one": off_by_one,
    "swapped arguments": swapped_arguments,
    "wrong function": wrong_function,
    "wrong condition": wrong_condition,
    "removed branch": removed_branch,
    "removed statement": removed_statement,
    "wrong return": wrong_return,
}


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of one file."""

    path: str
    function: str
    """Name of the function, with its class."""
    kind: str
    line: int
    edit: Edit


def mutations(path: str, data: bytes) -> list[Mutation]:
    """All of a file, in the order of its text, each of which parses and is another program. None of a file that is
    not UTF-8 Python."""
    try:
        source = Source(data)
    except ValueError:
        return []
    before = ast.dump(source.tree)
    candidates = [
        Mutation(path, ".".join(name), kind, getattr(node, "lineno", function.lineno), edit)
        for name, function in functions(source.tree)
        for node in (function, *(node for statement in function.body for node in _walk(statement)))
        for kind, mutator in MUTATORS.items()
        for edit in mutator(node, source)
    ]
    return [one for one in dict.fromkeys(candidates) if _is_another(one.edit.apply(data), before)]


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement; no docstrings, annotations, formatted texts, assertions."""
    if isinstance(node, ast.JoinedStr | ast.Assert):  # before Python 3.12 the places of what is in a text are wrong
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    yield node
    for name, value in ast.iter_fields(node):
        # These fields say something about the code, or callers see them: argument lists hold annotations and defaults.
        not_code = {"annotation", "returns", "type_params", "decorator_list", "args"}
        if name in not_code and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child)


def _is_another(data: bytes, before: str) -> bool:
    try:
        return ast.dump(ast.parse(data.decode())) != before
    except (SyntaxError, ValueError):
        return False
