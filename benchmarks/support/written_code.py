"""What the calculator recipe's model writes for its tool, computed without running it."""

from __future__ import annotations

import re

from penstock.datasets import RESULT_DECIMALS, BadExpression, evaluate, printed

_CODE = re.compile(rf"print\(round\((.+),\s*{RESULT_DECIMALS}\)\)")


def computed(code: str) -> str:
    """What ``print(round(EXPRESSION,4))`` prints. Raises `BadExpression` for all other code."""
    found = _CODE.fullmatch(code.strip())
    if found is None:
        raise BadExpression("not understood")
    return printed(evaluate(found[1]))
