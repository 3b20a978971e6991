"""Expectations of tests that can be made wrong: which bytes of a test file to change, and into what.

Only what certainly fails where the test itself passes is changed here: an assertion at the top of a test's body, which
nothing before it can have jumped over. A literal is changed within its own form (a letter for a letter, a digit for a
digit), so that only its meaning separates the wrong one from the right one. Where a test has no literal, the
expected side of an equality is put into a list, and other comparisons are inverted.

What a test takes from its parameters or from a constant of its module is listed as well; a change there has to be
proven (`reference`), since code between it and the assertion may undo it.
"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from penstock.sandbox.swe.source import Edit, Function, Source, first_line, functions, other_sign

Name = tuple[str, ...]
"""A test function, with the classes it is in."""
_EQUAL = {"assertEqual", "assertEquals", "assertListEqual", "assertTupleEqual", "assertDictEqual", "assertSetEqual"}
_OPPOSITE = {"assertTrue": "assertFalse", "assertFalse": "assertTrue", "assertIsNone": "assertIsNotNone"}
_RAISED = ("ValueError", "TypeError", "KeyError", "IndexError")
_TURNED: dict[type[ast.cmpop], tuple[str, str]] = {
    **{ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.Is: ("is", "is not")},
    **{ast.Lt: ("<", ">="), ast.LtE: ("<=", ">"), ast.Gt: (">", "<="), ast.GtE: (">=", "<")},
}


def wrong_tests(
    data: bytes, names: Collection[Name], dice: random.Random, *, values_only: bool = False
) -> dict[Name, Edit]:
    """One edit for each of these functions that has an expectation to get wrong; none of a file that is not Python.

    `values_only`: those alone that change an expected value.
    """
    source = readable(data)
    if source is None:
        return {}
    chosen: dict[Name, Edit] = {}
    for name, function in functions(source.tree):
        if name not in names or _may_fail(function, source):
            continue
        edits = _values(function, source, dice)
        if not edits and not values_only:
            edits = [edit for one in _sure(function) for edit in _turned(one, source, dice)]
        if edits:
            chosen[name] = dice.choice(edits)
    return chosen


def readable(data: bytes) -> Source | None:
    """None of a file that is not Python, and of one whose failures may be what passes."""
    try:
        source = Source(data)
    except ValueError:
        return None
    # A class or the module as a whole is marked as expected to fail: then a failure is what passes.
    marks = [one for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef) for one in node.decorator_list]
    assigned = [node for node in ast.walk(source.tree) if isinstance(node, ast.Assign)]
    marks += [node.value for node in assigned if any(getattr(one, "id", "") == "pytestmark" for one in node.targets)]
    return None if any("xfail" in source.text(mark) for mark in marks) else source


def apply_all(data: bytes, edits: Collection[Edit]) -> bytes:
    """Returns `data` after the edits of one file, which do not overlap."""
    for edit in sorted(edits, key=lambda one: -one.start):
        data = edit.apply(data)
    return data


def _may_fail(function: Function, source: Source) -> bool:
    """Return True if it may be marked as one that fails, or pytest does not run it as a plain function."""
    start, end = source.lines(first_line(function), function.end_lineno or function.lineno)
    marked = any(word in source.data[start:end] for word in (b"xfail", b"expectedFailure"))
    return marked or any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function))


def _values(function: Function, source: Source, dice: random.Random) -> list[Edit]:
    """Edits of literals that the sure assertions compare with, written there or bound to a name before."""
    sure = list(_sure(function))
    named = _named_literals(function, sure)
    edits: dict[int, Edit] = {}
    for statement in sure:
        written = [literal for side in _sides(statement) if (literal := _written(side, named)) is not None]
        if len(written) == 1 and (edit := other_literal(written[0], source, dice)):
            edits[edit.start] = edit
    return list(edits.values())


def _sure(function: Function) -> Iterator[ast.stmt]:
    """Statements that a passing test has come to: those before anything that may have left the function."""
    for statement in function.body:
        if any(isinstance(node, ast.Return) for node in ast.walk(statement)):
            return
        yield statement


def _written(side: ast.expr, named: Mapping[str, ast.expr]) -> ast.expr | None:
    """The expected value on this side of an equality, if it is written out there or under a name of `named`."""
    if isinstance(side, ast.Name):
        return named.get(side.id)
    return side if _is_written_out(side) else None


def _sides(statement: ast.stmt) -> list[ast.expr]:
    """The two that an assertion compares for equality; none of other statements."""
    if isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare):
        compare = statement.test
        if len(compare.ops) == 1 and isinstance(compare.ops[0], ast.Eq):
            return [compare.left, compare.comparators[0]]
    elif (call := _unittest_call(statement)) is not None and call[0] in _EQUAL and len(call[1].args) >= 2:
        return call[1].args[:2]
    return []


def _named_literals(function: Function, sure: Sequence[ast.stmt]) -> dict[str, ast.expr]:
    """Local names that are bound once, to a literal, and only ever compared: a change of one changes nothing else."""
    assigned = {
        one.targets[0].id: one.value
        for one in sure
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name) and len(one.targets) == 1
    }
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    bound = Counter(node.id for node in names if not isinstance(node.ctx, ast.Load))
    read = Counter(node.id for node in names if isinstance(node.ctx, ast.Load))
    sides = [side for node in ast.walk(function) if isinstance(node, ast.stmt) for side in _sides(node)]
    compared = Counter(side.id for side in sides if isinstance(side, ast.Name))
    return {
        name: value
        for name, value in assigned.items()
        if bound[name] == 1 and read[name] == compared[name] and _is_written_out(value)
    }


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
    if sides := _sides(statement):
        yield _in_a_list(sides, source, dice)
    elif isinstance(statement, ast.Assert):
        yield from _turned_assert(statement.test, source)
    elif (call := _unittest_call(statement)) is not None and call[0] in _OPPOSITE:
        end = source.span(call[1].func)[1]
        yield Edit(end - len(call[0]), end, _OPPOSITE[call[0]])
    elif isinstance(statement, ast.With):
        yield from _other_exception(statement, source, dice)


def _in_a_list(sides: Sequence[ast.expr], source: Source, dice: random.Random) -> Edit:
    """``a == b`` as ``a == [b, 7]``: an object that equals everything passes it, while it would fail ``a != b``.

    Of two elements: an array of one would be compared element by element and come out true.
    """
    left, right = sides
    expected = left if _calls(right) and not _calls(left) else right
    start, end = source.span(expected)
    return Edit(start, end, f"[{source.text(expected)}, {dice.randint(1, 9)}]")


def _calls(side: ast.expr) -> bool:
    return any(isinstance(node, ast.Call) and not _is_plain_call(node) for node in ast.walk(side))


def _is_plain_call(node: ast.Call) -> bool:
    plain = {"approx", "list", "tuple", "set", "frozenset", "dict", "sorted", "str", "int", "float", "len"}
    return getattr(node.func, "attr", getattr(node.func, "id", "")) in plain


def _turned_assert(test: ast.expr, source: Source) -> Iterator[Edit]:
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in _TURNED:
        start, gap = source.between(test.left, test.comparators[0])
        word, other = _TURNED[type(test.ops[0])]
        if gap.strip() == word:
            at = start + gap.index(word)
            yield Edit(at, at + len(word), other)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        start, text = source.span(test)[0], source.text(test).removeprefix("not")
        yield Edit(start, start + len("not") + len(text) - len(text.lstrip()), "")  # a parenthesis stays
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


_PLAIN = re.compile(r"""[bB]?(['"])(?!\1)([^'"\\\n]+)\1""")
_NUMBER = re.compile(r"\d+(\.\d+)?")


def other_literal(expected: ast.expr, source: Source, dice: random.Random) -> Edit | None:
    """The edit of one leaf of a literal (a list's, a dict's, …) after which it is certainly unequal to what it was."""
    constants = [node for node in ast.walk(expected) if isinstance(node, ast.Constant)]
    leaves = [leaf for leaf in constants if isinstance(leaf.value, bool | int | float | str | bytes)]
    dice.shuffle(leaves)
    for leaf in leaves:
        start, text = source.span(leaf)[0], source.text(leaf)
        if isinstance(leaf.value, bool):
            return Edit(start, start + len(text), str(not leaf.value))
        places = _places(text) if text.isascii() else []
        dice.shuffle(places)
        for at in places:
            edit = Edit(start + at, start + at + 1, other_sign(text[at], dice))
            if _differs(expected, edit, source):
                return edit
    return None


def other_value(text: str, dice: random.Random) -> str:
    """Return another value of the same type as this Python literal, or the same where none is certain."""
    source = Source(text.encode())
    edit = other_literal(ast.parse(text, mode="eval").body, source, dice)
    return text if edit is None else edit.apply(text.encode()).decode()


def _places(text: str) -> list[int]:
    """Places that may change: the first counting digit of a number; any letter or digit of a plain text; else none."""
    if _NUMBER.fullmatch(text):
        counting = [at for at, sign in enumerate(text) if sign in "123456789"]
        return counting[:1] or ([0] if text == "0" else [])
    match = _PLAIN.fullmatch(text)
    return [at for at in range(match.start(2), match.end(2)) if text[at].isalnum()] if match else []


def _differs(expected: ast.expr, edit: Edit, source: Source) -> bool:
    """Read back, it is of the same kind and another value; floats by more than any tolerance."""
    start, end = source.span(expected)
    inside = Edit(edit.start - start, edit.end - start, edit.text).apply(source.data[start:end]).decode()
    try:
        before, after = _value(source.text(expected)), _value(inside)
    except (ValueError, TypeError, SyntaxError):
        return False
    return type(before) is type(after) and before != after


def _value(text: str) -> object:
    node = ast.parse(text.strip(), mode="eval").body
    return ast.literal_eval(node.args[0] if isinstance(node, ast.Call) else node)


# ---- what a change must be proven of
def open_edits(data: bytes, names: Collection[Name], dice: random.Random, odds: float) -> list[Edit]:
    """Changed values in rows of ``parametrize`` and in constants of the module that these functions compare with.

    Each value at `odds`. Whether a test fails by it has to be seen: other code may read the same values.
    """
    source = readable(data)
    if source is None:
        return []
    constants = _constants(source.tree)
    cells: dict[int, ast.expr] = {}
    for name, function in functions(source.tree):
        if name in names:
            cells_found = [
                *_cells(function, constants),
                *(constants[one] for one in _compared(function) if one in constants),
            ]
            cells.update({source.span(cell)[0]: cell for cell in cells_found if _is_written_out(cell)})
    chosen = [cell for cell in cells.values() if dice.random() < odds]
    return [edit for cell in chosen if (edit := other_literal(cell, source, dice)) is not None]


def compared_parameters(data: bytes, names: Collection[Name]) -> dict[Name, tuple[str, ...]]:
    """Parameters that are expectations, by function: compared for equality and not passed to the code under test."""
    source = readable(data)
    if source is None:
        return {}
    expectations = {
        name: tuple(one for one in _parameters(function) if one in _compared(function))
        for name, function in functions(source.tree)
        if name in names
    }
    return {name: parameters for name, parameters in expectations.items() if parameters}


def _parameters(function: Function) -> list[str]:
    return [one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


def _compared(function: Function) -> set[str]:
    """Names that one side of an equality is made of, and that are on no side which calls the code under test."""
    expected: set[str] = set()
    passed: set[str] = set()
    for node in ast.walk(function):
        sides = _sides(node) if isinstance(node, ast.stmt) else []
        for side in sides:
            (passed if _calls(side) else expected).update(_names(side))
        # the arguments of ``self.assertEqual(…)`` are sides, not given to the code under test
        is_equality = isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _EQUAL
        if isinstance(node, ast.Call) and not _is_plain_call(node) and not is_equality:
            passed.update(_names(node))
    return expected - passed


def _names(node: ast.AST) -> set[str]:
    """Names in `node`, without those of keyword arguments (a tolerance)."""
    skipped = {id(one) for keyword in ast.walk(node) if isinstance(keyword, ast.keyword) for one in ast.walk(keyword)}
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and id(one) not in skipped}


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Names of the module that are assigned once."""
    assignments = [one for one in tree.body if isinstance(one, ast.Assign) and len(one.targets) == 1]
    named = [(one.targets[0].id, one.value) for one in assignments if isinstance(one.targets[0], ast.Name)]
    counted = Counter(name for name, _ in named)
    return {name: value for name, value in named if counted[name] == 1}


def _cells(function: Function, constants: Mapping[str, ast.expr]) -> Iterator[ast.expr]:
    """The values that ``parametrize`` gives to parameters which are expectations."""
    compared = _compared(function)
    for call in function.decorator_list:
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "parametrize" and len(call.args) >= 2:
            names, rows = _argument_names(call.args[0]), call.args[1]
            rows = constants.get(rows.id, rows) if isinstance(rows, ast.Name) else rows
            for row in rows.elts if isinstance(rows, ast.List | ast.Tuple) else ():
                values = [row]
                if isinstance(row, ast.Call):  # pytest.param(…)
                    values = row.args
                elif len(names) != 1:
                    values = row.elts if isinstance(row, ast.Tuple | ast.List) else []
                yield from (value for name, value in zip(names, values, strict=False) if name in compared)


def _argument_names(node: ast.expr) -> list[str]:
    """``"a, b"`` or ``["a", "b"]``"""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [one.strip() for one in node.value.split(",") if one.strip()]
    elements = node.elts if isinstance(node, ast.List | ast.Tuple) else []
    return [str(one.value) for one in elements if isinstance(one, ast.Constant)]
