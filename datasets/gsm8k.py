"""`penstock data gsm8k-equations`: GSM8K's calculator annotations (`<<48/2=24>>`) as one arithmetic task each."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from penstock.datasets.arithmetic import BadExpression, canonical, evaluate
from penstock.datasets.rows import arithmetic_row, write_parquet

DATA_SOURCE = "gsm8k_equations"
SPLITS = ("train", "test")

_ANNOTATION = re.compile(r"<<([^<>]*)>>")


class BadInput(ValueError):
    """A file is missing or a line is not GSM8K's; the message names the file and the line."""


def write_gsm8k_equations(
    input_dir: Path, out: Path, all_rows: bool = False, keep_duplicates: bool = False
) -> dict[str, int]:
    """Read `train.jsonl` and `test.jsonl`, write `train.parquet` and `test.parquet`; returns counts per split.

    Written are the annotations inside the base model's digit range, or all with `all_rows`. An expression is kept
    once per split, and one of the test split never in training, unless `keep_duplicates`. Per split counts:
    annotations, trivial (no operator), unreadable, disagree (stated result wrong beyond rounding), duplicates,
    in_range (of what is left), written. Raises `BadInput`.
    """
    counts: Counter[str] = Counter()
    seen: set[str] = set()
    for split in reversed(SPLITS):  # the test split first: training drops what it holds
        expressions = list(_tasks(input_dir / f"{split}.jsonl", split, counts))
        if not keep_duplicates:
            expressions = _once(expressions, seen, split, counts)
        rows = [arithmetic_row(text, DATA_SOURCE, split, index) for index, text in enumerate(expressions)]
        fitting = [row for row in rows if row["extra_info"]["in_range"]]
        counts[f"{split}_in_range"] = len(fitting)
        counts[f"{split}_written"] = len(rows if all_rows else fitting)
        write_parquet(rows if all_rows else fitting, out / f"{split}.parquet")
    return dict(counts)


def _tasks(path: Path, split: str, counts: Counter[str]) -> Iterator[str]:
    for annotation in _annotations(path):
        counts[f"{split}_annotations"] += 1
        expression, problem = _read(annotation)
        if problem:
            counts[f"{split}_{problem}"] += 1
        else:
            yield expression


def _annotations(path: Path) -> Iterator[str]:
    if not path.is_file():
        raise BadInput(f"{path}: no such file; --input takes the folder with GSM8K's train.jsonl and test.jsonl")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            yield from _ANNOTATION.findall(_answer(line, f"{path}, line {number}"))


def _answer(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInput(f"{where}: not JSON ({error.msg})") from error
    if not isinstance(row, dict) or not isinstance(row.get("answer"), str):
        raise BadInput(f"{where}: needs a text field `answer`, as GSM8K has it")
    return str(row["answer"])


def _read(annotation: str) -> tuple[str, str]:
    """The expression, and why it cannot be a task ("" if it can)."""
    text, _, stated = annotation.partition("=")
    expression = canonical(text)
    try:
        value, claim = evaluate(expression), evaluate(canonical(stated))
    except BadExpression:
        return expression, "unreadable"
    if not re.search(r"[\d).][-+*/]", expression):
        return expression, "trivial"
    decimals = len(stated.strip().partition(".")[2])
    # exact, or less than one unit of the last stated place away: rounded up, down or cut off
    agrees = abs(value - claim) < 10.0**-decimals and (decimals > 0 or not float(value).is_integer() or value == claim)
    return expression, "" if agrees or abs(value - claim) <= 1e-9 * abs(value) else "disagree"


def _once(expressions: list[str], seen: set[str], split: str, counts: Counter[str]) -> list[str]:
    fresh = [text for text in dict.fromkeys(expressions) if text not in seen]
    counts[f"{split}_duplicates"] = len(expressions) - len(fresh)
    seen.update(fresh)
    return fresh
