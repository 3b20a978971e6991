"""Environments of others in one shape: what `reset` and `step` return, as a step of ours. Standard library only.

`host.py` loads this file by its path: no folder of ours is on the import path of an environment's process.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

MAX_OBSERVATION_CHARS = 20_000
Json = dict[str, Any]


class BadAction(Exception):
    """The environment has no such action."""


class SteppedEnvironment:
    """One environment of Gymnasium's shape, old or new, or of TextWorld's: what `step` returns decides which."""

    def __init__(self, env: Any, settings: Json) -> None:
        self.env = env
        self._settings = settings
        self._total = 0.0

    def reset(self, seed: int) -> Json:
        returned = self._first(seed)
        pair = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)
        observation, info = returned if pair else (returned, _as_info(returned))
        if observation is None and self._settings.get("observe") != "render":
            raise TypeError("reset() returned None; expected the first observation, or (observation, info)")
        return self._answer(observation, info)

    def _first(self, seed: int) -> Any:
        parameters = inspect.signature(self.env.reset).parameters
        if "seed" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            return self.env.reset(seed=seed)
        if callable(getattr(self.env, "seed", None)):
            self.env.seed(seed)
        return self.env.reset()

    def step(self, action: str) -> Json:
        returned = self.env.step(self._action(action))
        if not isinstance(returned, tuple) or not 3 <= len(returned) <= 5:
            raise TypeError(
                f"step() returned {returned!r:.200}; expected (observation, reward, done) "
                "or (observation, reward, terminated, truncated, info)"
            )
        observation, reward, *ends = returned
        info = ends.pop() if isinstance(ends[-1], Mapping) else _as_info(observation)
        terminated, truncated = bool(ends[0]), len(ends) > 1 and bool(ends[1])
        # Gymnasium's own mark in the old shape of four: the end is its limit of steps.
        if len(ends) == 1 and (info.get("TimeLimit.truncated") or info.get("truncated")):
            terminated, truncated = False, True
        return self._answer(observation, info, self._reward(reward), terminated, truncated)

    def close(self) -> None:
        if callable(getattr(self.env, "close", None)):
            self.env.close()

    def _action(self, action: str) -> Any:
        """A number where the environment's actions are numbered: by its name, where the settings name them."""
        space = getattr(self.env, "action_space", None)
        first, count = int(getattr(space, "start", 0)), cast(Any, getattr(space, "n", None))
        if not hasattr(count, "__index__"):
            return action
        names = self._settings.get("actions")
        if names:
            return first + list(names).index(action)
        if not re.fullmatch(r"-?\d{1,9}", action) or not first <= int(action) < first + int(count):
            raise BadAction(f"an action is a number from {first} to {first + int(count) - 1}")
        return int(action)

    def _reward(self, value: Any) -> float:
        try:
            reward = float(value or 0.0)
        except (TypeError, ValueError, OverflowError):
            reward = math.nan
        if not math.isfinite(reward):
            raise TypeError(f"step() returned the reward {value!r:.80}, not a finite number")
        if self._settings.get("rewards") != "total":
            return reward
        before, self._total = self._total, reward
        return reward - before

    def _answer(
        self,
        observation: Any,
        info: Mapping[str, Any],
        reward: float = 0.0,
        terminated: bool = False,
        truncated: bool = False,
    ) -> Json:
        text = self._text(observation)
        return {
            "text": text[:MAX_OBSERVATION_CHARS],
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "state": self._state(text, info),
            "numbers": dict(list(_numbers(info))[:32]),
            "shown": {
                name: plain(info[name] if name in info else getattr(observation, name, None))
                for name in self._settings.get("show", ())
            },
        }

    def _text(self, observation: Any) -> str:
        if self._settings.get("observe") == "render":
            rendered = self.env.render()
            if not isinstance(rendered, str):
                raise TypeError(
                    f"render() returned {type(rendered).__name__}, not text: make it with render_mode 'ansi'"
                )
            return rendered
        return text_of(observation)

    def _state(self, text: str, info: Mapping[str, Any]) -> str:
        name = self._settings.get("state", "")
        if not name:
            return text
        if name in info:
            return json.dumps(plain(info[name]), sort_keys=True, default=repr)
        state = getattr(getattr(self.env, "unwrapped", self.env), name, None)
        state = getattr(self.env, name, None) if state is None else state
        if state is None:
            raise AttributeError(f"the environment has no {name!r}, nor its info: setting state")
        return json.dumps(plain(state() if callable(state) else state), sort_keys=True, default=repr)


class TextArena(SteppedEnvironment):
    """One of TextArena's for a single player: observations are fetched, and tell the whole game so far."""

    _heard = ""

    def reset(self, seed: int) -> Json:
        self.env.reset(num_players=1, seed=seed)
        return self._answer(self._news(), {})

    def step(self, action: str) -> Json:
        done, info = self.env.step(action)
        facts = dict(info or {})
        if not done:
            return self._answer(self._news(), facts)
        rewards, games = self.env.close()
        mine = (games or {}).get(0) or {}
        return self._answer(str(mine.get("reason") or ""), {**facts, **mine}, float((rewards or {}).get(0, 0.0)), True)

    def close(self) -> None:
        """`step` has closed a game that ended; another one has nothing open."""

    def _news(self) -> str:
        """Returns the new part of the observation: most wrappers repeat the whole game in each."""
        _, whole = self.env.get_observation()
        text = text_of(whole)
        before, self._heard = self._heard, text
        return text.removeprefix(before).strip("\n")


def text_of(observation: Any) -> str:
    """An observation as text; numbers, arrays and mappings as JSON."""
    if isinstance(observation, str):
        return observation
    for name in ("text", "observation", "feedback"):
        text = observation.get(name) if isinstance(observation, Mapping) else getattr(observation, name, None)
        if isinstance(text, str):
            return text
    if isinstance(observation, list | tuple) and observation and isinstance(observation[0], tuple):
        return "\n".join(str(part[1]) for part in observation)  # TextArena's (from, message, kind)
    return json.dumps(plain(observation), default=repr, ensure_ascii=False)


def plain(value: Any) -> Any:
    """Arrays as lists, sets sorted, numpy's numbers as Python's."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value), key=repr)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _as_info(observation: Any) -> Mapping[str, Any]:
    """TextWorld's states are both."""
    return observation if isinstance(observation, Mapping) else {}


def _numbers(info: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, entry in info.items():
        value = plain(entry)
        if isinstance(value, bool | int | float) and math.isfinite(value):
            yield str(name), float(value)


def wrapped(env: Any, settings: Json) -> SteppedEnvironment:
    theirs = callable(getattr(env, "get_observation", None)) and hasattr(env, "step")
    return (TextArena if theirs else SteppedEnvironment)(env, settings)
