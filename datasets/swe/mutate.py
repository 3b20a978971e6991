"""Mistakes as people make them, put into a function: one small change of its text, the rest as its author wrote it.

Mutation libraries of today (mutmut, cosmic-ray) come as whole test runners with a state of their own; what is needed
here is the list of changes.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from penstock.datasets.swe import expression_mutators, statement_mutators
from penstock.sandbox.swe import Edit, Function, Source, functions

Mutator = Callable[[ast.AST, Source], Iterator[Edit]]
MUTATORS: Mapping[str, Mutator] = {
    "comparison": expression_mutators.comparison,
    "arithmetic": expression_mutators.arithmetic,
    "boolean": expression_mutators.boolean,
    "negation": expression_mutators.negation,
    "off by one": expression_mutators.off_by_one,
    "swapped arguments": expression_mutators.swapped_arguments,
    "wrong function": expression_mutators.wrong_function,
    "wrong condition": statement_mutators.wrong_condition,
    "removed branch": statement_mutators.removed_branch,
    "removed statement": statement_mutators.removed_statement,
    "wrong return": statement_mutators.wrong_return,
}
_NOT_CODE = {"annotation", "returns", "type_params", "decorator_list", "args"}
"""Fields that say something about the code, or that callers see: argument lists hold annotations and defaults."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of one file."""

    path: str
    function: str
    """Its name, with its class."""
    kind: str
    line: int
    edit: Edit

    def apply(self, data: bytes) -> bytes:
        return self.edit.apply(data)


def mutations(path: str, data: bytes) -> list[Mutation]:
    """All of a file, in the order of its text, each of which parses and is another program. None of a file that is
    not UTF-8 Python."""
    try:
        source = Source(data)
    except ValueError:
        return []
    before = ast.dump(source.tree)
    found = [
        Mutation(path, ".".join(name), kind, getattr(node, "lineno", function.lineno), edit)
        for name, function in functions(source.tree)
        for node in _code_of(function)
        for kind, mutator in MUTATORS.items()
        for edit in mutator(node, source)
    ]
    return [one for one in dict.fromkeys(found) if _is_another(one.apply(data), before)]


def _code_of(function: Function) -> Iterator[ast.AST]:
    """The function itself, then the nodes of its body; no docstrings, annotations, formatted texts, assertions."""
    yield function
    for statement in function.body:
        yield from _walk(statement)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.JoinedStr | ast.Assert):  # before Python 3.12 the places of what is in a text are wrong
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in _NOT_CODE and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child)


def _is_another(data: bytes, before: str) -> bool:
    try:
        return ast.dump(ast.parse(data.decode())) != before
    except (SyntaxError, ValueError):
        return False
