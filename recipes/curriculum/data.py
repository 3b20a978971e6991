"""Calculator tasks as in collected data: few rows, most of them unsolvable.

    python -m penstock.recipes.curriculum.data --out data/curriculum

Writes train.parquet and eval.parquet. Of the rows to train on, fifteen in sixteen have an answer that is 1 too high.
A right answer earns nothing there, but for the few rows whose numbers are so large that the reward tolerates 1
(eight of 120 by default): however good the policy is, the groups of the others say nothing. Rows of
`calculator/large` and of `calculator/everyday` differ in their numbers; the evaluation has rows of both with the right
answers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from random import Random

from penstock.datasets import EVERYDAY, LARGE, Row, arithmetic_row, random_expression, write_parquet

MISLABELLED = 0.9375


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    parser.add_argument("--train", type=int, default=128, help="rows to train on, half of each data source")
    parser.add_argument("--eval", type=int, default=128, help="rows to evaluate on, half of each data source")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    dice, train, evaluation = Random(options.seed), [], []
    for source, profile in {"calculator/large": LARGE, "calculator/everyday": EVERYDAY}.items():
        expressions: dict[str, None] = {}
        while len(expressions) < (options.train + options.eval) // 2:
            expressions[random_expression(dice, profile)] = None
        drawn = list(expressions)
        evaluation += rows(drawn[: options.eval // 2], source, "eval")
        train += mislabelled(rows(drawn[options.eval // 2 :], source, "train"))
    write_parquet(train, options.out / "train.parquet")
    write_parquet(evaluation, options.out / "eval.parquet")
    print(f"{options.out}: {len(train)} rows to train on, {len(evaluation)} to evaluate on")


def rows(expressions: Sequence[str], source: str, split: str) -> list[Row]:
    return [arithmetic_row(text, source, split, index) for index, text in enumerate(expressions)]


def mislabelled(right: Sequence[Row]) -> list[Row]:
    """The same rows; the first of them, `MISLABELLED` of all, with an answer that is 1 too high."""
    wrong = int(len(right) * MISLABELLED)
    return [with_answer_off(row) if number < wrong else row for number, row in enumerate(right)]


def with_answer_off(row: Row) -> Row:
    label = row["reward_model"]
    return {**row, "reward_model": {**label, "ground_truth": repr(float(label["ground_truth"]) + 1)}}


if __name__ == "__main__":
    main()
