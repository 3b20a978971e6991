"""The room without a model: its rules, its solver, its splits, and the cold start's turns as the loop feeds them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests.recipes.conftest import RECIPES, played

from penstock.agent_loops import load_object, segments_of
from penstock.agent_loops.chat import chat_of
from penstock.deploy import load_config
from penstock.transfer_queue import Trajectory

pytestmark = pytest.mark.recipes
MODEL = f"model={RECIPES / 'calculator/model'}"
SIZE = 4
"""Of rooms that a test lays out; those of the recipe are smaller."""


def of(file: str, name: str) -> Any:
    """What a file of the recipe has."""
    return load_object(f"{RECIPES / 'sokoban' / file}:{name}", Path.cwd())


@pytest.fixture(scope="module")
def rooms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rooms")
    of("data.py", "main")(["--out", str(folder), "--train", "24", "--eval", "8", "--turns", "60"])
    return folder


def test_a_push_a_wall_and_both_views() -> None:
    moved, picture, places = (of("room.py", name) for name in ("moved", "picture", "places"))
    start, goal = ((2, 1), (2, 2)), (2, 4)
    assert picture(start, goal, SIZE).splitlines() == ["######", "#----#", "#@$-.#", "#----#", "#----#", "######"]
    assert places(start, goal, SIZE) == "@21 $22 .24"
    assert moved(start, "l", SIZE) == start, "a wall"
    assert moved(start, "d", SIZE) == ((3, 1), (2, 2))
    pushed = moved(moved(start, "r", SIZE), "r", SIZE)
    assert pushed == ((2, 3), (2, 4))
    assert moved(pushed, "r", SIZE) == pushed, "a box before a wall"
    assert picture(pushed, goal, SIZE).splitlines()[2] == "#--@*#"
    assert picture(((2, 4), (1, 1)), goal, SIZE).splitlines()[1:3] == ["#$---#", "#---+#"]


def test_best_moves_end_in_as_many_as_the_solver_says() -> None:
    distances, moved, best_moves = (of("room.py", name) for name in ("distances", "moved", "best_moves"))
    left = distances((1, 2), SIZE)
    assert max(left.values()) > 6
    assert ((2, 2), (1, 1)) not in left, "a box in a corner stays there"
    for position, count in left.items():
        now = position
        for _ in range(count):
            now = moved(now, best_moves(now, (1, 2), SIZE)[-1], SIZE)
        assert now[1] == (1, 2)
        assert best_moves(now, (1, 2), SIZE) == []


def test_a_room_ends_solved_or_when_it_no_longer_can_be() -> None:
    room, start_of, solution = (of("room.py", name) for name in ("SokobanRoom", "drawn", "solution"))
    start, goal = start_of(7, SIZE)
    one = room(start, goal, SIZE, 0, "places")
    one.reset()
    ends = [one.step(move)[1:4] for move in solution(start, goal, SIZE)]
    assert ends[-1] == (1.0, True, False)
    assert set(ends[:-1]) == {(0.0, False, False)}
    one = room(((1, 3), (1, 2)), (1, 4), SIZE, 2, "places")
    one.reset()
    assert one.step("l") == ("@12 $11 .14", 0.0, True, False, {"solved": False, "lost": True}), "a box in a corner"
    assert one.reset() == ("@13 $12 .14", {"solved": False, "lost": False})
    assert [one.step("u")[2] for _ in range(3)] == [False, False, True], "six moves are needed, eight were there"


def test_what_no_room_has_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="shortest solution of 90 to 99 moves"):
        of("room.py", "drawn")(0, SIZE, 90, 99)
    with pytest.raises(ValueError, match="'map'; there are picture, places"):
        of("room.py", "room")(0, view="map")
    with pytest.raises(SystemExit, match="84 rooms, not 85"):
        list(of("data.py", "seeds_of_rooms")(0, 85))


def test_splits_share_no_room(rooms: Path) -> None:
    drawn = of("room.py", "drawn")
    splits = {split: [drawn(seed) for seed in seeds_in(rooms / f"{split}.parquet")] for split in ("train", "eval")}
    assert (len(splits["train"]), len(splits["eval"])) == (24, 8)
    assert len({*splits["train"], *splits["eval"]}) == 32
    shown = [json.loads(line)["messages"] for line in (rooms / "conversations.jsonl").read_text().splitlines()]
    assert len(shown) == 60
    assert {move["content"] for _, move in shown} == set("udlr")


def test_a_player_without_the_habit_shows_solutions() -> None:
    start, goal = of("room.py", "drawn")(3)
    moves = len(of("room.py", "solution")(start, goal, of("room.py", "SIZE")))
    turns = list(islice(of("data.py", "played")([3], 0.0, Random(0)), 4 * moves))
    first, _ = of("data.py", "turn")(start, goal, "u")
    begun = [number for number, (seen, _) in enumerate(turns) if seen == first]
    assert begun == [0, moves, 2 * moves, 3 * moves]


@pytest.mark.parametrize(("policy", "reward"), [("oracle", 1.0), ("pacer", 0.0)])
async def test_who_knows_the_way_earns_everything(rooms: Path, policy: str, reward: float) -> None:
    found = await played("sokoban/learn.yaml", policy, MODEL, f"data.train={rooms / 'train.parquet'}", rows=12)
    assert found.failures == []
    assert found.rewards == [reward] * 12
    assert {one.metrics["env/solved"] for one in found.trajectories} == {reward}
    if policy == "oracle":
        assert {3, 4, 5, 6, 7} >= {one.num_turns for one in found.trajectories}
        assert all(len(set(one.extra["turn_states"])) == one.num_turns for one in found.trajectories)
        check_turns(found.trajectories, seeds_in(rooms / "train.parquet"))


def check_turns(trajectories: Sequence[Trajectory], seeds: Sequence[int]) -> None:
    """A turn of the cold start is, id for id, the segment of the episode's turn. `seeds`: of the rows in order."""
    chat = chat_of(str(RECIPES / "calculator/model"), load_config(RECIPES / "sokoban/learn.yaml", [MODEL]).agent)
    for one, seed in zip(trajectories, seeds, strict=False):
        segment = one.segments[0]
        move = chat.decode(segment.response_ids[:1])
        (shown,) = segments_of(chat, of("data.py", "turn")(*of("room.py", "drawn")(seed), move))
        for name in ("prompt_ids", "response_ids", "response_mask", "turn_starts"):
            np.testing.assert_array_equal(getattr(shown, name), getattr(segment, name), err_msg=name)


def seeds_in(file: Path) -> list[int]:
    return [row["extra_info"]["seed"] for row in pq.read_table(file).to_pylist()]
