"""Arithmetic expressions as tasks: read safely, evaluated, printed as the tool prints them, and judged for range.

The digit range that the calculator base model was made for is `in_range`, and only that: the generator of
problems, the base model's traces and the GSM8K converter all ask it.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

RESULT_DECIMALS = 4
"""The base model's calls read `print(round(EXPRESSION,4))`: results are short and have one spelling."""

Number = int | float

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class BadExpression(ValueError):
    """The text is not an expression of numbers, + - * / and parentheses, or has no value (division by zero)."""


def canonical(text: str) -> str:
    """The expression without spaces and with `0.5` for `.5`, so that it is spelled in one way."""
    return re.sub(r"(?<![\d.])\.(?=\d)", "0.", re.sub(r"\s+", "", text))


def evaluate(expression: str) -> Number:
    """Value of `expression` by walking its syntax tree; nothing is ever executed. Raises `BadExpression`."""
    # `//` and `**` are other operators in Python: refused here rather than read as two signs.
    if not re.fullmatch(r"[\d.+\-*/()]{1,200}", expression) or "//" in expression or "**" in expression:
        raise BadExpression(f"not an arithmetic expression: {expression[:80]!r}")
    try:
        return _value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ZeroDivisionError, OverflowError) as error:
        raise BadExpression(f"cannot evaluate {expression!r}: {error}") from error


def printed(value: Number) -> str:
    """Return the output of `print(round(value, 4))`: the base model's answer to a problem."""
    return str(round(value, RESULT_DECIMALS))


def operands(expression: str) -> list[str]:
    """The numbers of the expression, as written."""
    return re.findall(r"\d+\.?\d*", expression)


def in_range(expression: str) -> bool:
    """Return True if the base model was made for it: one to three operators, operands of up to six digits, at most 22
    characters, and at most ten in the result."""
    numbers = operands(expression)
    signed = re.search(r"(^|[-+*/(])[-+]", expression)
    if signed is not None or not 2 <= len(numbers) <= 4 or len(expression) > 22:
        return False
    if any(len(number.replace(".", "")) > 6 for number in numbers):
        return False
    try:
        result = printed(evaluate(expression))
    except BadExpression:
        return False
    return len(result) <= 10 and "e" not in result


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            result: Number = _OPERATORS[type(op)](_value(left), _value(right))
            return result
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            value = _value(operand)
            return -value if isinstance(node.op, ast.USub) else value
        case _:
            raise BadExpression(f"not an arithmetic expression: {ast.unparse(node)!r}")
