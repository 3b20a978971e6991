"""Wrong expectations, written where the right ones stood.

Only what is sure to fail where the test itself passes is changed: an assertion at the top of a test's body, which
nothing before it can have jumped over. A literal is changed within its own form (a letter for a letter, a digit for a
digit), so that nothing but its meaning tells the wrong one from the right one; where a test has no literal, its
comparison is turned round.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Collection, Iterator

from penstock.sandbox.swe.decoys.literals import other_literal
from penstock.sandbox.swe.source import Edit, Function, Source, first_line, functions

Name = tuple[str, ...]
"""A test function, with the classes it is in."""
_EQUAL = {"assertEqual", "assertEquals", "assertListEqual", "assertTupleEqual", "assertDictEqual", "assertSetEqual"}
_OPPOSITE = {"assertTrue": "assertFalse", "assertFalse": "assertTrue", "assertIsNone": "assertIsNotNone"}
_RAISED = ("ValueError", "TypeError", "KeyError", "IndexError")
_MAY_FAIL = (b"xfail", b"expectedFailure")
_TURNED: dict[type[ast.cmpop], tuple[str, str]] = {
    **{ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.Is: ("is", "is not")},
    **{ast.Lt: ("<", ">="), ast.LtE: ("<=", ">"), ast.Gt: (">", "<="), ast.GtE: (">=", "<")},
}


def wrong_tests(data: bytes, names: Collection[Name], dice: random.Random) -> dict[Name, Edit]:
    """One edit for each of these functions that has an expectation to get wrong; none of a file that is not Python."""
    try:
        source = Source(data)
    except ValueError:
        return {}
    if _fails_by_design(source):
        return {}
    found = {name: _edits(function, source, dice) for name, function in functions(source.tree) if name in names}
    return {name: dice.choice(edits) for name, edits in found.items() if edits}


def apply_all(data: bytes, edits: Collection[Edit]) -> bytes:
    """Edits of one file, which do not overlap."""
    for edit in sorted(edits, key=lambda one: -one.start):
        data = edit.apply(data)
    return data


def _edits(function: Function, source: Source, dice: random.Random) -> list[Edit]:
    """Of changed literals; of turned comparisons where there are none."""
    start, end = source.lines(first_line(function), function.end_lineno or function.lineno)
    may_fail = any(word in source.data[start:end] for word in _MAY_FAIL)
    if may_fail or any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function)):
        return []
    sure = list(_sure(function))
    literal = [edit for one in sure for expected in _literals(one) if (edit := other_literal(expected, source, dice))]
    return literal or [edit for one in sure for edit in _turned(one, source, dice)]


def _fails_by_design(source: Source) -> bool:
    """A class or the module as a whole is marked as expected to fail: then a failure is what passes."""
    marks = [one for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef) for one in node.decorator_list]
    assigned = [node for node in ast.walk(source.tree) if isinstance(node, ast.Assign)]
    marks += [node.value for node in assigned if any(getattr(one, "id", "") == "pytestmark" for one in node.targets)]
    return any("xfail" in source.text(mark) for mark in marks)


def _sure(function: Function) -> Iterator[ast.stmt]:
    """Statements that a passing test has come to: those before anything that may have left the function."""
    for statement in function.body:
        if any(isinstance(node, ast.Return) for node in ast.walk(statement)):
            return
        yield statement


def _literals(statement: ast.stmt) -> Iterator[ast.expr]:
    """What the assertion expects something to be equal to, written out."""
    sides: list[ast.expr] = []
    if isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare):
        compare = statement.test
        if len(compare.ops) == 1 and isinstance(compare.ops[0], ast.Eq):
            sides = [compare.left, compare.comparators[0]]
    elif (call := _unittest_call(statement)) is not None and call[0] in _EQUAL:
        sides = call[1].args[:2]
    written = [side for side in sides if _is_written_out(side)]
    if len(sides) == 2 and len(written) == 1:
        yield written[0]


def _is_written_out(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and not node.keywords and len(node.args) == 1:  # pytest.approx(0.5)
        return getattr(node.func, "attr", getattr(node.func, "id", "")) == "approx" and _is_written_out(node.args[0])
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return False
    return True


def _unittest_call(statement: ast.stmt) -> tuple[str, ast.Call] | None:
    """The name of ``self.NAME(…)`` and the call."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return None
    owner = value.func.value
    return (value.func.attr, value) if isinstance(owner, ast.Name) and owner.id == "self" else None


def _turned(statement: ast.stmt, source: Source, dice: random.Random) -> Iterator[Edit]:
    if isinstance(statement, ast.Assert):
        yield from _turned_assert(statement.test, source)
    elif (call := _unittest_call(statement)) is not None and call[0] in _OPPOSITE:
        end = source.span(call[1].func)[1]
        yield Edit(end - len(call[0]), end, _OPPOSITE[call[0]])
    elif isinstance(statement, ast.With):
        yield from _other_exception(statement, source, dice)


def _turned_assert(test: ast.expr, source: Source) -> Iterator[Edit]:
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in _TURNED:
        start, gap = source.between(test.left, test.comparators[0])
        word, other = _TURNED[type(test.ops[0])]
        if gap.strip() == word:
            at = start + gap.index(word)
            yield Edit(at, at + len(word), other)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield Edit(source.span(test)[0], source.span(test.operand)[0], "")
    elif isinstance(test, ast.Call | ast.Name | ast.Attribute):
        start, _ = source.span(test)
        yield Edit(start, start, "not ")


def _other_exception(statement: ast.With, source: Source, dice: random.Random) -> Iterator[Edit]:
    """``with pytest.raises(ValueError)`` waits for another one."""
    call = statement.items[0].context_expr
    if len(statement.items) != 1 or not isinstance(call, ast.Call) or not call.args:
        return
    name = getattr(call.func, "attr", "")
    expected = call.args[0]
    if name in ("raises", "assertRaises", "assertRaisesRegex") and getattr(expected, "id", "") in _RAISED:
        others = [one for one in _RAISED if one != getattr(expected, "id", "")]
        yield Edit(*source.span(expected), dice.choice(others))
