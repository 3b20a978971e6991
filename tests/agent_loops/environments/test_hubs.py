"""Environments of PyPI, unmodified: TextArena's Sokoban, TextWorld, Gymnasium, a real OpenEnv server."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.agent_loops.environments.conftest import HUBS, Play, hub
from tests.agent_loops.loops.conftest import check_fed
from tests.ports import free_port

from penstock.transfer_queue import OutcomeKind

pytestmark = [pytest.mark.hubs, pytest.mark.deep]
ROOT = Path(__file__).parents[3]
TEXT = {"path": [str(HUBS / "text")]}
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
SOKOBAN = {
    **TEXT,
    "env": "textarena:Sokoban-v0",
    "options": {"dim_room": [5, 5], "num_boxes": 1, "max_turns": 40},
    "state": "room_state",
}


def sokoban_plan(board: str) -> list[str]:
    """The shortest way to push one box onto its goal, from the board as it is printed."""
    rows = [line.split() for line in board.splitlines() if line.startswith("#")]
    cells = {(y, x): mark for y, row in enumerate(rows) for x, mark in enumerate(row)}
    start = next(at for at, mark in cells.items() if mark in "PS")
    boxes = frozenset(at for at, mark in cells.items() if mark in "X√")
    goals = {at for at, mark in cells.items() if mark in "OS√"} or set()
    seen, ways = {(start, boxes)}, deque([(start, boxes, [])])
    while ways:
        at, boxes, way = ways.popleft()
        if boxes <= goals:
            return way
        for name, (dy, dx) in MOVES.items():
            to, beyond = (at[0] + dy, at[1] + dx), (at[0] + 2 * dy, at[1] + 2 * dx)
            moved = boxes - {to} | {beyond} if to in boxes else boxes
            if cells.get(to, "#") == "#" or (to in boxes and (cells.get(beyond, "#") == "#" or beyond in boxes)):
                continue
            if (to, moved) not in seen:
                seen.add((to, moved))
                ways.append((to, moved, [*way, name]))
    return []


def walker() -> Callable[[str], str]:
    plan: list[str] = []

    def says(context: str) -> str:
        if not plan:
            plan.extend(sokoban_plan(context.rpartition("Current Board:")[2]))
        return f"I go [{plan.pop(0)}]"

    return says


@hub("text", "textarena")
async def test_textarenas_sokoban_is_solved_and_its_states_are_the_rooms(play: Play) -> None:
    begun = []
    for seed in range(1, 6):
        one = await play("gymnasium", walker(), SOKOBAN, {"seed": seed}, max_turns=40)
        done = one.done
        assert (done.reward, done.outcome.kind, done.metrics["env/ended"]) == (1.0, OutcomeKind.COMPLETED, 1.0)
        states = done.extra["turn_states"]
        assert len(set(states)) == done.num_turns
        check_fed(one.client, done)
        waiting = await play("gymnasium", ["I wait."], SOKOBAN, {"seed": seed})
        assert set(waiting.done.extra["turn_states"]) == {states[0]}
        begun.append(states)
    assert len({states[0] for states in begun}) == len(begun)
    assert max(map(len, begun)) > 2


@hub("text", "textarena")
async def test_textarena_tells_each_thing_once(play: Play, chat_for) -> None:
    played = await play("gymnasium", ["[up]", "[left]", "[down]"], SOKOBAN, {"seed": 3}, max_turns=3)
    assert chat_for().decode(played.prompts[-1]).count("You are solving the Sokoban puzzle") == 1


@hub("text", "textworld")
async def test_textworlds_room_is_won_by_its_walkthrough(play: Play, tmp_path: Path) -> None:
    settings = {
        **TEXT,
        "env": f"{ROOT / 'recipes/hubs/textworld_room.py'}:room",
        "options": {"games": str(tmp_path), "quest_length": 2},
        "show": ["admissible_commands", "hint"],
        "state": "key",
        "remembered_turns": 1,
    }

    def says(context: str) -> str:
        return re.findall(r"hint: (.*?)(?:<\||\n|$)", context)[-1]

    played = [await play("gymnasium", says, settings, {"seed": 7}) for _ in range(2)]
    for one in played:
        assert (one.done.outcome.kind, one.done.metrics["env/won"], one.done.reward) == (
            OutcomeKind.COMPLETED,
            1.0,
            1.0,
        )
        assert one.done.num_turns == len(one.done.segments) == 2
        check_fed(one.client, one.done)
    assert played[0].done.extra["turn_states"] == played[1].done.extra["turn_states"]
    lost = await play("gymnasium", ["look"], settings, {"seed": 7}, max_turns=3)
    assert (lost.done.reward, lost.outcome.reason) == (0.0, "turns")


@hub("text", "gymnasium")
async def test_gymnasiums_frozen_lake_by_named_actions_and_rendered_text(play: Play, chat_for) -> None:
    settings = {
        **TEXT,
        "env": "FrozenLake-v1",
        "options": {"is_slippery": False, "render_mode": "ansi"},
        "observe": "render",
        "actions": ["left", "down", "right", "up"],
    }
    way = ["down", "Down.", "right", "sideways", "right", "down", "right"]
    played = await play("gymnasium", way, settings)
    assert (played.done.reward, played.done.metrics["env/invalid_turns"]) == (1.0, 1.0)
    assert "SFFF" in chat_for().decode(played.prompts[0]).replace("\x1b[41mS\x1b[0m", "S")


@hub("text", "gymnasium")
async def test_gymnasiums_own_limit_of_steps_is_a_truncation(play: Play) -> None:
    settings = {**TEXT, "env": "gymnasium:FrozenLake-v1", "options": {"is_slippery": False, "max_episode_steps": 3}}
    played = await play("gymnasium", ["0"], settings)
    assert (played.outcome.kind, played.outcome.reason, played.done.num_turns) == (OutcomeKind.TRUNCATED, "turns", 3)


# OpenEnv --------------------------------------------------------------------------------------------------------------
SERVER = """
import sys
sys.path.append({recipe!r})
import openenv_server
openenv_server.main()
"""


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    pytest.fail(f"the server did not come up (exit status {process.poll()})")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A real OpenEnv server with two places."""
    port = free_port()
    program = SERVER.format(recipe=str(ROOT / "recipes/hubs"))
    argv = [sys.executable, "-P", "-c", program, "--port", str(port), "--sessions", "2"]
    process = subprocess.Popen(
        argv, env={**os.environ, "PYTHONPATH": str(HUBS / "openenv")}, cwd=tmp_path_factory.mktemp("openenv")
    )
    try:
        wait_for_port(port, process)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def searcher() -> Callable[[str], str]:
    """Halves what is left."""
    low, high, last = 0, 9, -1

    def says(context: str) -> str:
        nonlocal low, high, last
        hint = max(("Higher.", "Lower.", "Find the digit."), key=context.rfind)
        low, high = (last + 1 if hint == "Higher." else low), (last - 1 if hint == "Lower." else high)
        last = (low + high) // 2
        return str(last)

    return says


@hub("openenv", "openenv")
async def test_openenvs_own_server_plays_episodes_side_by_side(play: Play, server: tuple[str, object]) -> None:
    url, _ = server
    settings = {"url": url, "observation_field": "text"}
    runs = [play("openenv", searcher(), settings, {"seed": seed}) for seed in (1, 2, 3, 1)]
    played = await asyncio.gather(*runs)
    for one in played:
        assert one.outcome.kind == OutcomeKind.COMPLETED
        assert one.done.turn_rewards[-1] == 1.0
        check_fed(one.client, one.done)
    assert played[0].done.turn_rewards == played[3].done.turn_rewards
