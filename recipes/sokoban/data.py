"""Rooms of Sokoban by their seeds, and turns of a player who knows the way and has a bad habit: the cold start.

    python -m penstock.recipes.sokoban.data --out data/sokoban

Writes train.parquet and eval.parquet, which share no room, and conversations.jsonl: turns played in training rooms. In
a share of them (`--habit`) the player goes up whatever he sees, so a model that was trained on them solves few rooms,
and has the right move and a wrong one to choose from at most positions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from penstock.datasets import Row, write_parquet
from penstock.recipes.sokoban.room import SIZE, VIEW, VIEWS, Cell, Position, best_moves, drawn, moved

QUESTION = "Move?"
Message = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    parser.add_argument("--train", type=int, default=68, help="rooms to train on")
    parser.add_argument("--eval", type=int, default=16, help="rooms to evaluate on")
    parser.add_argument("--turns", type=int, default=16000, help="turns of the cold start")
    parser.add_argument("--habit", type=float, default=0.3, help="share of its turns in which the player goes up")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    seeds = list(islice(seeds_of_rooms(options.seed, options.train + options.eval), options.train + options.eval))
    splits = {"eval": seeds[: options.eval], "train": seeds[options.eval :]}
    for split, chosen in splits.items():
        write_parquet([row(seed, split, index) for index, seed in enumerate(chosen)], options.out / f"{split}.parquet")
    dice = Random(f"turns/{options.seed}")
    turns = list(islice(played(splits["train"], options.habit, dice), options.turns))
    lines = [json.dumps({"messages": messages}) for messages in turns]
    (options.out / "conversations.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{options.out}: {options.train} and {options.eval} rooms, {len(turns)} turns")


def seeds_of_rooms(first: int, count: int) -> Iterator[int]:
    """Seeds from `first` on, one for each different room. Raises `SystemExit` if there are too few rooms."""
    seen = set()
    for seed in range(first, first + count * 50):  # most seeds repeat a room that is there
        room = drawn(seed)
        if room not in seen:
            seen.add(room)
            yield seed
    raise SystemExit(f"there are {len(seen)} rooms, not {count}: lower --train or --eval")


def row(seed: int, split: str, index: int) -> Row:
    return {
        "data_source": "sokoban",
        "prompt": [{"role": "user", "content": QUESTION}],
        "reward_model": {"style": "rule", "ground_truth": "environment"},
        "extra_info": {"split": split, "index": index, "seed": seed},
    }


def played(seeds: Sequence[int], habit: float, dice: Random) -> Iterator[list[Message]]:
    """Turns of one episode after the other, without end. An episode ends where the room does, at its first mistake."""
    while True:
        position, goal = drawn(dice.choice(seeds))
        while best := best_moves(position, goal, SIZE):
            move = "u" if dice.random() < habit else best[0]
            yield turn(position, goal, move)
            if move not in best:
                break
            position = moved(position, move, SIZE)


def turn(position: Position, goal: Cell, move: str) -> list[Message]:
    """Returns one turn as the model reads it with `remembered_turns: 0`."""
    seen = VIEWS[VIEW](position, goal, SIZE)
    return [{"role": "user", "content": f"{QUESTION}\n\n{seen}"}, {"role": "assistant", "content": move}]


if __name__ == "__main__":
    main()
