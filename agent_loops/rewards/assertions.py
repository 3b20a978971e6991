"""Assertions, in two halves: the box calls the program, this process compares.

    assert sorted(total([1, 2])) == [3]       the box evaluates `total([1, 2])`, this process the rest

The program shares its process with whatever calls it: it can read its caller's frames, and return an object that is
equal to everything. So no expected value enters the box, and what leaves it is plain data. Calls, names, attributes and
subscripts are evaluated in the box, unless they are in `NAMES`; operators and literals here. A conversion of one value
of the program (`list(f(3))`) is the box's too. What cannot be divided so is refused.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, SimpleNamespace
from typing import Any, Literal, TypeGuard

NAMES: dict[str, Any] = {
    function.__name__: function
    for function in (abs, all, any, bool, bytes, dict, float, frozenset, int, isinstance, len, list, max, min, round)
} | {function.__name__: function for function in (set, sorted, str, sum, tuple)}
"""Evaluated here. None takes long on data that the program chose."""
MATHS = SimpleNamespace(
    isclose=math.isclose, isnan=math.isnan, isinf=math.isinf, sqrt=math.sqrt, pi=math.pi, inf=math.inf, nan=math.nan
)
"""The names of `math` that are evaluated here."""
_CONTAINERS = {"dict", "frozenset", "len", "list", "set", "sorted", "tuple"}
_SCALARS = {"bytes", "float", "int", "max", "min", "round", "str", "sum"}
"""Conversions: the value may be a generator, or an object with a length or a text, which have no form outside."""
_PREDICATES = {"startswith", "endswith", "equals"} | {
    name for kind in (str, bytes, set, float) for name in dir(kind) if name.startswith("is")
}
"""Methods that say whether a value is as expected. An object of the program may have them all, and say yes."""
_IN_BOX = (ast.Call, ast.Name, ast.Attribute, ast.Subscript)


class BadAssertion(ValueError):
    """The assertion cannot be compared outside the program's process; the message says how to write it."""


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One piece of source that the box runs, in order."""

    kind: Literal["exec", "eval"]
    source: str


@dataclass(frozen=True, slots=True)
class Assertion:
    """The statements of one test case."""

    steps: tuple[ProgramStep, ...]
    """Statements that the box runs, and expressions whose values come back."""
    tests: tuple[CodeType, ...]
    """Expressions that must be true here, over the names that `_value_name` gives those values."""

    @classmethod
    def parse(cls, text: str) -> Assertion:
        """Raises `BadAssertion`."""
        try:
            body = ast.parse(text).body
        except (SyntaxError, ValueError, TypeError) as error:
            raise BadAssertion(f"{str(text)[:100]!r} is not Python: {error}") from error
        split = _Split()
        tests = tuple(split.split(statement) for statement in body if split.is_test(statement))
        if not tests:
            raise _refused(text, "it asserts nothing")
        return cls(tuple(split.steps), tests)

    def holds(self, output: Any) -> bool:
        """`output`: what the box sent, one encoded value for each step that is evaluated."""
        if not isinstance(output, list) or len(output) != sum(step.kind == "eval" for step in self.steps):
            return False
        try:
            values = {_value_name(index): decode(value) for index, value in enumerate(output)}
            names = {"__builtins__": {}, "math": MATHS, **NAMES, **values}
            return all(eval(test, names) for test in self.tests)  # noqa: S307 - `_Split` lets no other names pass
        except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError, MemoryError):
            return False  # as the assertion would have raised


def decode(value: Any) -> Any:
    """Plain data as `harness.encode` wrote it. What it had no form for is an object that is equal to nothing else."""
    if not isinstance(value, dict):
        return value  # a list too: the box, which may have been taken over, wrote it
    ((kind, content),) = value.items()
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    if kind == "dict":
        return {decode(key): decode(item) for key, item in content}
    container = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}.get(kind)
    return container(map(decode, content)) if container else object()


class _Split(ast.NodeTransformer):
    """Collects what the box runs, and leaves names for its values."""

    def __init__(self) -> None:
        self.steps: list[ProgramStep] = []
        self.values = 0

    def is_test(self, statement: ast.stmt) -> TypeGuard[ast.Assert]:
        """Returns whether it is an assertion; other statements become steps."""
        if isinstance(statement, ast.Assert):
            return True
        if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Import, ast.ImportFrom)):
            raise _refused(statement, f"a {type(statement).__name__} could judge inside the box")
        _check_no_comparison(statement)
        self.steps.append(ProgramStep("exec", ast.unparse(statement)))
        return False

    def split(self, statement: ast.Assert) -> CodeType:
        """Returns the part of an assertion that is compared here."""
        before = self.values
        text = ast.unparse(statement)
        for node in _truths(statement.test):
            if _judges(node):
                raise _refused(node, "the program could answer in place of the call that judges")
        test = ast.fix_missing_locations(ast.Expression(self.visit(statement.test)))
        if self.values == before:
            raise _refused(text, "it calls nothing of the program")
        return compile(test, "assertion", "eval")

    def visit(self, node: ast.AST) -> Any:
        if _in_box(node):
            return self._take(node)
        ours = (ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare)
        if isinstance(node, ast.expr) and not isinstance(node, (*ours, *_IN_BOX)):
            raise _refused(node, f"{type(node).__name__} has no form outside the program")
        if isinstance(node, ast.Compare) and sum(map(_of_program, _sides(node))) > 1:
            raise _refused(node, "both sides come from the program")
        if isinstance(node, ast.Call) and _name_called(node) == "isinstance" and any(map(_of_program, node.args[1:])):
            raise _refused(node, "a class of the program has no form outside it")
        # Operators for values of the program too. Others could take for ever on a number that it chose.
        if isinstance(node, ast.BinOp) and not isinstance(node.op, (ast.Add, ast.Sub, ast.Div)) and _of_program(node):
            raise _refused(node, "the operator could take for ever on a value of the program")
        return self.generic_visit(node)

    def _take(self, node: ast.AST) -> ast.Name:
        _check_no_comparison(node)
        self.steps.append(ProgramStep("eval", ast.unparse(node)))
        self.values += 1
        return ast.Name(_value_name(self.values - 1), ast.Load())


def _check_no_comparison(node: ast.AST) -> None:
    """A comparison in what the box runs would show the program what is expected, and let it answer."""
    if any(isinstance(part, ast.Compare | ast.comprehension) for part in ast.walk(node)):
        raise _refused(node, "the comparison is inside the box")


def _truths(node: ast.expr) -> Iterator[ast.expr]:
    """Yields the expressions of which only the truth counts."""
    match node:
        case ast.BoolOp():
            parts = node.values
        case ast.UnaryOp(op=ast.Not()):
            parts = [node.operand]
        case ast.Compare() if any(
            isinstance(part, ast.Constant) and isinstance(part.value, bool) for part in _sides(node)
        ):
            parts = _sides(node)
        case ast.Call(func=ast.Name(id="all" | "any" | "bool")):
            parts = node.args
        case ast.List() | ast.Tuple():
            parts = node.elts
        case _:
            yield node
            return
    for part in parts:
        yield from _truths(part)


def _sides(node: ast.Compare) -> list[ast.expr]:
    return [node.left, *node.comparators]


def _judges(node: ast.expr) -> bool:
    """A name, a call that is given a value of the program (it may be given what that must be), a predicate of one."""
    if isinstance(node, ast.Call) and _in_box(node):
        if _converts(node):
            return _name_called(node) in _SCALARS and _judges(node.args[0])
        if isinstance(node.func, ast.Attribute) and (node.func.attr in _PREDICATES or node.func.attr.startswith("__")):
            return True
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        return any(isinstance(part, ast.Call) and _in_box(part) for value in arguments for part in ast.walk(value))
    return isinstance(node, ast.Name) and _in_box(node)


def _in_box(node: ast.AST) -> bool:
    """Returns whether the box evaluates `node`: a part of the program, or anything not in `NAMES` and `MATHS`."""
    if isinstance(node, ast.Call):
        return _in_box(node.func) or _converts(node)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "math":
        return not hasattr(MATHS, node.attr)
    if isinstance(node, ast.Name):
        return node.id != "math" and node.id not in NAMES
    return isinstance(node, _IN_BOX)


def _converts(node: ast.AST) -> bool:
    """``list(f(3))``: one of `_CONTAINERS` and `_SCALARS`, of one value of the program."""
    if not (isinstance(node, ast.Call) and _name_called(node) in _CONTAINERS | _SCALARS):
        return False
    return len(node.args) == 1 and not node.keywords and _in_box(node.args[0])


def _name_called(node: ast.AST) -> str:
    """Empty if `node` is not a call of a plain name."""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _of_program(node: ast.AST) -> bool:
    return any(map(_in_box, ast.walk(node)))


def _value_name(index: int) -> str:
    return f"_value_{index}"


def _refused(source: str | ast.AST, reason: str) -> BadAssertion:
    text = source if isinstance(source, str) else ast.unparse(source)
    return BadAssertion(
        f"{text[:100]!r} cannot be compared outside the program's process: {reason};"
        " write `assert function(arguments) == value`, or inputs, outputs and fn_name"
    )
