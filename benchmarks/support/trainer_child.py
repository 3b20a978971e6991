"""One side of `penstock bench trainer` as a separate process: its memory is its own, and it waits while others train.

python -m benchmarks.support.trainer_child SIDE SETTINGS(JSON)
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from benchmarks.support.child import answer_questions, own_stdout
from benchmarks.support.train_side import Settings, TrainSide
from benchmarks.support.work import Work


def make_side(name: str, settings: Settings) -> TrainSide:
    if name == "packed":
        from benchmarks.support.packed_side import PackedSide

        return PackedSide(settings)
    from benchmarks.support.padded_side import PaddedSide

    return PaddedSide(settings)


def answer(side: Any, question: dict[str, Any]) -> dict[str, Any]:
    match question["do"]:
        case "load":
            side.load(Work.read(question["work"]))
            return {}
        case "step":
            return asdict(side.step(memory=question.get("memory", False)))
        case unknown:
            raise ValueError(f"no such question: {unknown}")


def main() -> None:
    replies = own_stdout()
    side = make_side(sys.argv[1], Settings(**json.loads(sys.argv[2])))
    try:
        answer_questions(replies, lambda question: answer(side, question))
    finally:
        side.close()


if __name__ == "__main__":
    main()
