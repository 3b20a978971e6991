"""Notebooks of digits, and conversations that read them: how the recipe's model learns to read, and to forget.

    python -m penstock.recipes.compaction.data --out data/compaction

Writes train.parquet, eval.parquet and conversations.jsonl. The conversations are segments of compacted episodes: half
of their summaries tell what was read since the last one alone, so a model that was trained on them loses the rest.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from penstock.datasets import Row, write_parquet

QUESTION = "Digits?"
PER_SEGMENT = 2
"""Pages between two summaries, as `compact_at` of the recipe has it."""
Message = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    parser.add_argument("--train", type=int, default=2048, help="notebooks to train on")
    parser.add_argument("--eval", type=int, default=128, help="notebooks to evaluate on")
    parser.add_argument("--conversations", type=int, default=3000, help="notebooks that are read for the cold start")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for split, count in {"train": options.train, "eval": options.eval}.items():
        dice = Random(f"{split}/{options.seed}")
        write_parquet([row(notebook(dice), split, index) for index in range(count)], options.out / f"{split}.parquet")
    dice = Random(f"conversations/{options.seed}")
    segments = [segment for _ in range(options.conversations) for segment in read(notebook(dice), dice)]
    lines = [json.dumps({"messages": messages}) for messages in segments]
    (options.out / "conversations.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{options.out}: {options.train} and {options.eval} notebooks, {len(segments)} conversations")


def notebook(dice: Random) -> str:
    return "".join(dice.choice("0123456789") for _ in range(dice.choice((4, 5, 6))))


def row(digits: str, split: str, index: int) -> Row:
    return {
        "data_source": "notebook",
        "prompt": [{"role": "user", "content": QUESTION}],
        "reward_model": {"style": "rule", "ground_truth": digits},
        "extra_info": {"split": split, "index": index, "digits": digits},
    }


def read(digits: str, dice: Random) -> Iterator[list[Message]]:
    """The segments of one episode, as `agent.loop: compaction` makes them."""
    notes = digits_noted = ""
    for start in range(0, len(digits), PER_SEGMENT):
        new = digits[start : start + PER_SEGMENT]
        messages = begin(notes)
        for place, digit in enumerate(new, start=start + 1):
            more = "end" if place == len(digits) else "more"
            messages += [CALL, {"role": "tool", "content": f"{digit} {more}"}]
        if len(new) < PER_SEGMENT:
            yield [*messages, {"role": "assistant", "content": digits_noted + new}]
            return
        digits_noted = new if dice.random() < 0.5 else digits_noted + new
        notes = f"{digits_noted} {more}"
        yield [*messages, {"role": "user", "content": "Notes?"}, {"role": "assistant", "content": notes}]
    yield [*begin(notes), {"role": "assistant", "content": digits_noted}]


def begin(notes: str) -> list[Message]:
    return [{"role": "user", "content": f"{QUESTION}\n\nNotes:\n{notes}" if notes else QUESTION}]


CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "next", "arguments": {}}}],
}


if __name__ == "__main__":
    main()
