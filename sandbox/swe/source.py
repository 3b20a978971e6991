"""A Python file as bytes with the places of its syntax: what is not touched stays as its author wrote it."""

from __future__ import annotations

import ast
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Edit:
    """Bytes `start` to `end` replaced by `text`."""

    start: int
    end: int
    text: str

    def apply(self, data: bytes) -> bytes:
        return data[: self.start] + self.text.encode() + data[self.end :]


class Source:
    """UTF-8 with line ends of ``\\n``. Raises `ValueError` for other files, and for what does not parse."""

    def __init__(self, data: bytes) -> None:
        if b"\r" in data or b"\0" in data or b"\f" in data:
            raise ValueError("line ends other than \\n")
        self.data = data
        try:
            self.tree = ast.parse(data.decode())
        except SyntaxError as error:
            raise ValueError(str(error)) from error
        self._starts = [0, *(at + 1 for at, byte in enumerate(data) if byte == 0x0A)]

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Bytes of an expression or statement, without its decorators."""
        start = self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return start, end

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.data[start:end].decode()

    def between(self, left: ast.AST, right: ast.AST) -> tuple[int, str]:
        """Returns the start of the text between two nodes, and the text."""
        start, end = self.span(left)[1], self.span(right)[0]
        return start, self.data[start:end].decode()

    def lines(self, first: int, last: int) -> tuple[int, int]:
        """Bytes of whole lines, from 1, line end included."""
        end = self._starts[last] if last < len(self._starts) else len(self.data)
        return self._starts[first - 1], end


def other_sign(sign: str, dice: random.Random) -> str:
    """Another letter of the same case, or another digit; never a 0: a number that begins with it may not be one."""
    form = next(form for form in (string.ascii_lowercase, string.ascii_uppercase, string.digits) if sign in form)
    return dice.choice([one for one in form if one not in (sign, "0")])


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.Module) -> Iterator[tuple[tuple[str, ...], Function]]:
    """Functions of the module and methods of its classes, named from the outermost class; none within another one."""
    yield from _functions_of(tree.body, ())


def _functions_of(body: list[ast.stmt], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Function]]:
    for statement in body:
        if isinstance(statement, Function):
            yield (*path, statement.name), statement
        elif isinstance(statement, ast.ClassDef):
            yield from _functions_of(statement.body, (*path, statement.name))
        elif isinstance(statement, ast.If | ast.Try):
            for inner in (statement.body, statement.orelse):
                yield from _functions_of(inner, path)


def first_line(statement: ast.stmt) -> int:
    """Return the first line of a statement, its decorators included."""
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(one.lineno for one in decorators)])
