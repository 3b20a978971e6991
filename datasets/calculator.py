"""`penstock data calculator`: generated arithmetic problems, no download. Same seed, same files."""

from __future__ import annotations

from pathlib import Path
from random import Random

from penstock.datasets.expressions import LARGE, random_expression
from penstock.datasets.rows import Row, arithmetic_row, write_parquet

DATA_SOURCE = "calculator"


def problems(train: int, evaluation: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Rows for training and evaluation; no expression occurs twice, neither within a split nor across."""
    rng = Random(seed)
    expressions: dict[str, None] = {}
    while len(expressions) < train + evaluation:
        expressions[random_expression(rng, LARGE)] = None
    drawn = list(expressions)
    return _rows(drawn[evaluation:], "train"), _rows(drawn[:evaluation], "eval")


def write(out: Path, train: int = 4096, evaluation: int = 128, seed: int = 0) -> dict[str, int]:
    """Write `train.parquet` and `eval.parquet` into `out`; returns their row counts."""
    train_rows, eval_rows = problems(train, evaluation, seed)
    write_parquet(train_rows, out / "train.parquet")
    write_parquet(eval_rows, out / "eval.parquet")
    return {"train": len(train_rows), "eval": len(eval_rows)}


def _rows(expressions: list[str], split: str) -> list[Row]:
    return [arithmetic_row(text, DATA_SOURCE, split, index) for index, text in enumerate(expressions)]
