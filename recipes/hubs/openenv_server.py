"""An OpenEnv server with a small environment: a digit is to be found, and each guess is answered with higher or lower.

PYTHONPATH=.hubs/openenv python -P -m penstock.recipes.hubs.openenv_server --port 8765
"""

import argparse
import random
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    text: str


class Hint(Observation):
    text: str


class Digit(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._secret = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **further: Any) -> Hint:
        self._secret = random.Random(seed).randrange(10)
        self._state = State(episode_id=episode_id, step_count=0)
        return Hint(text="Find the digit.", done=False, reward=0.0)

    def step(self, action: Guess, timeout_s: float | None = None, **further: Any) -> Hint:
        self._state.step_count += 1
        last = self._state.step_count >= 4
        if not action.text.isdigit():
            return Hint(text="A digit, please.", done=last, reward=-0.2)
        digit = int(action.text)
        if digit == self._secret:
            return Hint(text="Found.", done=True, reward=1.0)
        return Hint(text="Higher." if digit < self._secret else "Lower.", done=last, reward=-0.1)

    @property
    def state(self) -> State:
        return self._state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--sessions", type=int, default=64)
    options = parser.parse_args()
    app = create_app(Digit, Guess, Hint, env_name="digit", max_concurrent_envs=options.sessions)
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
