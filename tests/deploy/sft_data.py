"""Conversations of the calculator for tests of `penstock sft`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from penstock.datasets import EVERYDAY, evaluate, printed, question, random_expression

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "recipes" / "calculator" / "model"


def tool_trace(expression: str) -> list[dict[str, Any]]:
    """Question, call, result, answer."""
    result = printed(evaluate(expression))
    code = {"code": f"print(round({expression},4))"}
    call = {"type": "function", "function": {"name": "python", "arguments": code}}
    return [
        {"role": "user", "content": question(expression)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]


def traces(count: int, seed: int = 0) -> list[list[dict[str, Any]]]:
    dice = Random(seed)
    return [tool_trace(random_expression(dice, EVERYDAY)) for _ in range(count)]


def write_messages(path: Path, conversations: Sequence[Any], **columns: Any) -> Path:
    path.write_text("".join(json.dumps({"messages": one, **columns}) + "\n" for one in conversations))
    return path
