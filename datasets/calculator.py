"""`penstock data calculator`: generated arithmetic, no download. The same seed writes the same files.

Expressions follow GSM8K's calculator annotations (`48/2`, `2*(3+2)`, `0.75*120`); results stay in range.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

from penstock.datasets.arithmetic import in_range
from penstock.datasets.rows import Row, arithmetic_row, write_parquet


@dataclass(frozen=True, slots=True)
class Profile:
    """The distribution of expressions; the three tuples are weights, probabilities are from 0 to 1."""

    operators: tuple[float, ...]
    """Weights of 1, 2, 3 operators."""
    digits: tuple[float, ...]
    """Weights of operands with 1, 2, 3 ... digits."""
    signs: tuple[float, float, float, float]
    """Weights of + - * /."""
    decimal: float
    """An operand has one or two decimals."""
    round_number: float
    """An operand ends in zeros (400, 15000)."""
    parentheses: float
    """Two neighbours are bracketed, if there are two operators or more."""


LARGE = Profile(
    operators=(0.62, 0.27, 0.11),
    digits=(0.05, 0.2, 0.35, 0.3, 0.1),
    signs=(0.3, 0.25, 0.3, 0.15),
    decimal=0.15,
    round_number=0.05,
    parentheses=0.2,
)
"""The quickstart's problems: too large for mental arithmetic."""
EVERYDAY = Profile(
    operators=(0.8, 0.15, 0.05),
    digits=(0.28, 0.42, 0.18, 0.07, 0.03, 0.02),
    signs=(0.26, 0.17, 0.38, 0.19),
    decimal=0.12,
    round_number=0.25,
    parentheses=0.12,
)
"""The lengths and operators of grade-school word problems."""


def random_expression(rng: Random, profile: Profile) -> str:
    """One expression that `in_range` accepts."""
    while True:
        count = rng.choices((1, 2, 3), profile.operators)[0]
        numbers = [_operand(rng, profile) for _ in range(count + 1)]
        signs = rng.choices("+-*/", profile.signs, k=count)
        if count > 1 and rng.random() < profile.parentheses:
            # never around the whole expression: at least one neighbour stays outside
            first = rng.randrange(count)
            right = first + 1 + (rng.random() < 0.3 and count - first > 1 and first > 0)
            numbers[first] = "(" + numbers[first]
            numbers[right] += ")"
        expression = numbers[0] + "".join(sign + number for sign, number in zip(signs, numbers[1:], strict=True))
        if in_range(expression):
            return expression


def _operand(rng: Random, profile: Profile) -> str:
    def integer(length: int) -> str:
        return str(rng.randrange(10 ** (length - 1), 10**length))

    length = rng.choices(range(1, len(profile.digits) + 1), profile.digits)[0]
    if rng.random() < profile.decimal:
        places = rng.randint(1, 2)
        whole = integer(min(length, 4) - 1) if length > 1 else "0"
        return f"{whole}.{rng.randrange(1, 10**places):0{places}d}"
    if rng.random() < profile.round_number and length > 1:
        nonzero = rng.randint(1, length - 1)
        return integer(nonzero) + "0" * (length - nonzero)
    return integer(length)


DATA_SOURCE = "calculator"


def problems(train: int, evaluation: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Return rows for training and for evaluation. Every expression occurs once in both together."""
    rng = Random(seed)
    expressions: dict[str, None] = {}
    while len(expressions) < train + evaluation:
        expressions[random_expression(rng, LARGE)] = None
    drawn = list(expressions)
    return _rows(drawn[evaluation:], "train"), _rows(drawn[:evaluation], "eval")


def write_calculator(out: Path, train: int = 4096, evaluation: int = 128, seed: int = 0) -> dict[str, int]:
    """Write `train.parquet` and `eval.parquet` into `out`; returns their row counts."""
    train_rows, eval_rows = problems(train, evaluation, seed)
    write_parquet(train_rows, out / "train.parquet")
    write_parquet(eval_rows, out / "eval.parquet")
    return {"train": len(train_rows), "eval": len(eval_rows)}


def _rows(expressions: list[str], split: str) -> list[Row]:
    return [arithmetic_row(text, DATA_SOURCE, split, index) for index, text in enumerate(expressions)]
