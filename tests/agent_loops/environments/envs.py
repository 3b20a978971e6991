"""Environments of the tests, run in processes of their own."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

made: list[Any] = []
"""In a process of an episode: the environments it made."""


class Corridor:
    """Gymnasium's shape without its package: `goal` steps to the right; a global generator decides the start."""

    def __init__(self, goal: int = 3, noise: bool = False) -> None:
        made.append(self)
        self.goal, self.noise, self.at = goal, noise, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.at = 0
        return self._seen(), {"made": len(made), "pid": os.getpid(), "drawn": random.random(), "seed": seed}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += action == "right"
        return (
            self._seen(),
            -0.1 + (self.at >= self.goal),
            self.at >= self.goal,
            False,
            {"made": len(made), "at": self.at},
        )

    def key(self) -> int:
        return self.at

    def _seen(self) -> str:
        noise = f" {time.monotonic_ns()}" if self.noise else ""
        return f"at {self.at} of {self.goal}{noise}"


class Old:
    """The old shape: a seed of its own, and four values."""

    action_space = type("Discrete", (), {"n": 3, "start": 0, "contains": lambda self, one: False})()

    def seed(self, seed: int) -> None:
        self.seeded = seed

    def reset(self) -> list[int]:
        return [self.seeded, 0]

    def step(self, action: int) -> tuple[list[int], float, bool, dict[str, Any]]:
        assert isinstance(action, int)
        return [self.seeded, action], float(action), action == 2, {"TimeLimit.truncated": False}


class Scores:
    """TextWorld's shape: a state that is a dict, the score so far, and whether it is over."""

    def reset(self) -> dict[str, Any]:
        self.score = 0
        return {"feedback": "A room.", "won": False, "admissible_commands": ["look", "go"]}

    def step(self, action: str) -> tuple[dict[str, Any], int, bool]:
        self.score += 2
        return (
            {"feedback": f"> {action}", "won": self.score >= 4, "admissible_commands": []},
            self.score,
            self.score >= 4,
        )


class Broken(Corridor):
    """Fails in the way that its options say."""

    def __init__(self, where: str = "step", how: str = "raises", pid_file: str = "") -> None:
        super().__init__()
        self.where, self.how, self.pid_file = where, how, pid_file

    def reset(self, **given: Any) -> Any:
        if self.where == "reset":
            self._fail()
        return super().reset(**given)

    def step(self, action: str) -> Any:
        if self.where == "step":
            self._fail()
        return super().step(action)

    def _fail(self) -> None:
        if self.pid_file:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            Path(self.pid_file).write_text(f"{os.getpid()} {child.pid}")
        if self.how == "raises":
            raise ValueError("the door is stuck")
        if self.how == "hangs":
            time.sleep(1000)
        if self.how == "spins":
            while True:
                pass
        if self.how == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.how == "exits":
            os._exit(3)
        if self.how == "leaves":
            sys.exit("enough")


class Starts(Corridor):
    """Leaves a process behind."""

    def __init__(self, pid_file: str) -> None:
        super().__init__(goal=1)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        Path(pid_file).write_text(f"{os.getpid()} {child.pid}")


class Floods(Corridor):
    def _seen(self) -> str:
        return "x" * 5_000_000


class Silent:
    """`reset` or `step` lacks its `return`."""

    def __init__(self, where: str) -> None:
        self.where = where

    def reset(self, seed: int) -> str | None:
        return None if self.where == "reset" else "go"

    def step(self, action: str) -> Any:
        rewards = {"text": "right", "nan": float("nan")}
        return (action, rewards[self.where], False) if self.where in rewards else None


def raises_when_made(**options: Any) -> Any:
    raise OSError(f"no maze {options}")
