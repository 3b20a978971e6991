"""A room of Sokoban with one box, in Gymnasium's shape: a factory that `agent.settings.env` names, and its solver.

    #####
    #--@#        # wall   - floor   @ player   $ box   . goal
    #-$-#        + the player on the goal   * the box on it
    #-.-#
    #####

A move is u, d, l or r. The player walks, and pushes the box where the cell behind it is free; any other move changes
nothing. The box on the goal ends the room with reward 1. It ends with 0 as soon as the moves that are left, as many as
the shortest solution has and `slack`, can no longer bring the box there. Only the standard library: an environment's
process imports this file.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from random import Random
from typing import Any

Cell = tuple[int, int]
"""Row and column, from 1: the walls are rows and columns 0 and `size` + 1."""
Position = tuple[Cell, Cell]
"""Cells of the player and of the box."""
MOVES: Mapping[str, Cell] = {"u": (-1, 0), "d": (1, 0), "l": (0, -1), "r": (0, 1)}
SIZE = 3
LEAST, MOST = 3, 7
"""Moves of the shortest solution, from a room's start."""


# the rules ------------------------------------------------------------------------------------------------------------
def moved(position: Position, move: str, size: int) -> Position:
    """After a move; the same position where a wall, or a box before a wall, is in the way."""
    player, box = position
    to = _neighbour(player, move)
    if not _inside(to, size):
        return position
    if to != box:
        return to, box
    pushed = _neighbour(box, move)
    return (to, pushed) if _inside(pushed, size) else position


def _neighbour(cell: Cell, move: str) -> Cell:
    rows, columns = MOVES[move]
    return cell[0] + rows, cell[1] + columns


def _inside(cell: Cell, size: int) -> bool:
    return min(cell) >= 1 and max(cell) <= size


def cells(size: int) -> list[Cell]:
    return list(product(range(1, size + 1), repeat=2))


# the solver -----------------------------------------------------------------------------------------------------------
@cache
def distances(goal: Cell, size: int) -> Mapping[Position, int]:
    """Position → fewest moves that bring the box to the goal; without the positions from which none do."""
    before: dict[Position, list[Position]] = defaultdict(list)
    for position in _positions(size):
        if position[1] != goal:
            for move in MOVES:
                before[moved(position, move, size)].append(position)
    fewest = {position: 0 for position in _positions(size) if position[1] == goal}
    waiting = deque(fewest)
    while waiting:
        position = waiting.popleft()
        for earlier in before[position]:
            if earlier not in fewest:
                fewest[earlier] = fewest[position] + 1
                waiting.append(earlier)
    return fewest


def _positions(size: int) -> Iterator[Position]:
    return ((player, box) for player, box in product(cells(size), repeat=2) if player != box)


def best_moves(position: Position, goal: Cell, size: int) -> list[str]:
    """The first moves of all shortest solutions; none where the box is on the goal or can no longer come there."""
    fewest = distances(goal, size)
    if not fewest.get(position):
        return []
    return [move for move in MOVES if fewest.get(moved(position, move, size)) == fewest[position] - 1]


# rooms ----------------------------------------------------------------------------------------------------------------
def drawn(seed: int, size: int = SIZE, least: int = LEAST, most: int = MOST) -> tuple[Position, Cell]:
    """The start and the goal of a seed's room. Raises `ValueError` where no room of this size has such a solution."""
    dice = Random(seed)
    for _ in range(10_000):
        player, box, goal = dice.sample(cells(size), 3)
        if least <= distances(goal, size).get((player, box), -1) <= most:
            return (player, box), goal
    raise ValueError(f"no room of {size} by {size} cells has a shortest solution of {least} to {most} moves")


def picture(position: Position, goal: Cell, size: int) -> str:
    """The room as it is drawn above."""
    player, box = position
    signs = {goal: ".", box: "$", player: "@"}
    if goal in position:
        signs[goal] = "*" if box == goal else "+"
    rows = ["".join(signs.get((row, column), "-") for column in range(1, size + 1)) for row in range(1, size + 1)]
    wall = "#" * (size + 2)
    return "\n".join([wall, *(f"#{row}#" for row in rows), wall])


def places(position: Position, goal: Cell, size: int) -> str:
    """The same in fewer tokens: row and column of player, box and goal, such as ``@13 $22 .32``."""
    return " ".join(f"{sign}{row}{column}" for sign, (row, column) in zip("@$.", (*position, goal), strict=True))


VIEWS: Mapping[str, Callable[[Position, Cell, int], str]] = {"picture": picture, "places": places}
VIEW = "places"


class SokobanRoom:
    """One episode's."""

    def __init__(self, start: Position, goal: Cell, size: int, slack: int, view: str) -> None:
        self._start, self._goal, self._size = start, goal, size
        self._view = VIEWS[view]
        self._needed = distances(goal, size)
        self._limit = self._needed[start] + slack
        self._position, self._moves_left = start, self._limit

    def reset(self) -> tuple[str, dict[str, Any]]:
        self._position, self._moves_left = self._start, self._limit
        return self._seen()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._position = moved(self._position, action, self._size)
        self._moves_left -= 1
        text, info = self._seen()
        return text, float(info["solved"]), info["solved"] or info["lost"], False, info

    def _seen(self) -> tuple[str, dict[str, Any]]:
        solved = self._position[1] == self._goal
        lost = self._needed.get(self._position, self._limit + 1) > self._moves_left
        return self._view(self._position, self._goal, self._size), {"solved": solved, "lost": lost}


def room(
    seed: int, *, size: int = SIZE, least: int = LEAST, most: int = MOST, slack: int = 0, view: str = VIEW
) -> SokobanRoom:
    """The room of a seed, which a shortest solution of `least` to `most` moves solves. Raises `ValueError`."""
    if view not in VIEWS:
        raise ValueError(f"options.view is {view!r}; there are {', '.join(VIEWS)}")
    start, goal = drawn(seed, size, least, most)
    return SokobanRoom(start, goal, size, slack, view)


def solution(start: Position, goal: Cell, size: int) -> Sequence[str]:
    """The moves of one shortest solution."""
    moves: list[str] = []
    position = start
    while best := best_moves(position, goal, size):
        moves.append(best[0])
        position = moved(position, best[0], size)
    return moves
