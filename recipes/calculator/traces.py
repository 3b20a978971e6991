"""Synthetic traces for the base model: a question answered from the head (mostly wrong), or by calling the tool."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from random import Random

from penstock.datasets import EVERYDAY, LARGE, RESULT_DECIMALS, evaluate, operands, printed, question, random_expression

PYTHON_TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python code. Variables persist between calls.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
"""Schema of the `python` tool; a test compares it with the tool's own."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One conversation, with the parts that the model has to write."""

    question: str
    call: str | None
    """The tool call's text, or None: answered from the head."""
    observation: str
    answer: str


def trace(rng: Random, call_share: float) -> Trace:
    """One trace; with probability `call_share` it calls the tool and repeats what the tool printed."""
    expression = random_expression(rng, LARGE if rng.random() < 0.6 else EVERYDAY)
    if rng.random() < call_share:
        result = printed(evaluate(expression))
        return Trace(question(expression), call_text(expression), result, result)
    return Trace(question(expression), None, "", answer_from_the_head(expression, rng))


def code_for(expression: str) -> str:
    """The code that the model writes: rounded, so that results are short and have one spelling."""
    return f"print(round({expression},{RESULT_DECIMALS}))"


def call_text(expression: str) -> str:
    """The call as the chat template writes it."""
    arguments = json.dumps({"code": code_for(expression)})
    return f'<tool_call>\n{{"name": "python", "arguments": {arguments}}}\n</tool_call>'


def answer_from_the_head(expression: str, rng: Random) -> str:
    """Right for one-digit sums and products; otherwise two digits and zeros, the second digit off by 1 to 3."""
    value = evaluate(expression)
    numbers = operands(expression)
    if len(numbers) == 2 and all(len(number) == 1 for number in numbers) and "/" not in expression:
        return str(value)
    place = 10 ** max(0, math.floor(math.log10(abs(value) or 1)) - 1)
    return str((round(value / place) + rng.choice((-3, -2, -1, 1, 2, 3))) * place)
