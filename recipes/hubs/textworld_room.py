"""Rooms of TextWorld in Gymnasium's shape: a factory that `agent.settings.env` names.

A game is made from its seed once, some seconds, and kept in `games` under a name of all that it is made of.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import textworld


class Room:
    """A game of one room, made from a seed."""

    def __init__(self, file: Path) -> None:
        infos = textworld.EnvInfos(
            admissible_commands=True,
            description=True,
            inventory=True,
            location=True,
            objective=True,
            policy_commands=True,
            won=True,
        )
        self._env = textworld.start(str(file), infos)
        self._state: Any = None

    def reset(self) -> tuple[str, dict[str, Any]]:
        self._state = self._env.reset()
        return f"{self._state.objective}\n\n{self._state.description.strip()}", self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        before = self._state.score
        self._state, _, done = self._env.step(action)
        feedback = self._state.feedback.partition("\n>")[0].strip()
        return feedback, float(self._state.score - before), bool(done), False, self._info()

    def key(self) -> list[str]:
        """Returns the player's place, what is seen there and what the player holds."""
        return [self._state.location or "", self._state.description or "", self._state.inventory or ""]

    def close(self) -> None:
        self._env.close()

    def _info(self) -> dict[str, Any]:
        state = self._state
        hint = (state.policy_commands or [""])[0]
        return {"admissible_commands": list(state.admissible_commands or []), "won": bool(state.won), "hint": hint}


def room(seed: int, rooms: int = 2, objects: int = 3, quest_length: int = 2, games: str = "data/textworld") -> Room:
    file = Path(games) / f"{rooms}-{objects}-{quest_length}-{seed}.z8"
    if not file.is_file():
        _make(file, seed, rooms, objects, quest_length)
    return Room(file)


def _make(file: Path, seed: int, rooms: int, objects: int, quest_length: int) -> None:
    """Whole or not at all: members of a group make it at the same time. Its other parts come first."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        options = textworld.GameOptions()
        options.seeds, options.nb_rooms, options.nb_objects, options.quest_length = seed, rooms, objects, quest_length
        options.path = str(Path(folder) / file.name)
        textworld.make(options)
        for part in sorted(Path(folder).glob(f"{file.stem}.*"), key=lambda one: one.suffix == file.suffix):
            target = file.with_suffix(part.suffix)
            shutil.copy(part, f"{target}.{os.getpid()}")
            os.replace(f"{target}.{os.getpid()}", target)
