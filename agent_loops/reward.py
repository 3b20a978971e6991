"""The run's reward function: verl's ``compute_score``, sync or async, plain number or dict."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.agent_loops.errors import InfraFailure, LoadError
from penstock.agent_loops.load import load_object
from penstock.transfer_queue.trajectory import Task

REWARD_DEADLINE_S = 60.0
SLOW_S = 0.25
"""A plain function that takes longer stops every episode of the worker meanwhile; it is named in the log."""
PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Score:
    """What the reward function said."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """``reward/NAME`` for each further number it returned."""


class RewardFunction:
    """Calls ``compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict with "score"``.

    A plain function is called in the event loop; make a slow one ``async def`` or give it a service of its own.
    """

    def __init__(self, compute_score: Callable[..., Any], name: str = "compute_score") -> None:
        _check_signature(compute_score, name)
        self._compute_score = compute_score
        self._name = name
        self._warned = False

    @classmethod
    def load(cls, spec: str, recipe_dir: Path) -> RewardFunction:
        """By dotted path or ``FILE.py:function``. Raises `LoadError`."""
        function = load_object(spec, recipe_dir)
        if not callable(function):
            raise LoadError(f"reward {spec!r} is not a function")
        return cls(function, spec)

    async def score(self, task: Task, solution: str, further: Mapping[str, Any]) -> Score:
        """`further` joins the row's `extra_info`. Raises `InfraFailure("reward")`: never a silent 0."""
        arguments = {
            "data_source": task.data_source,
            "solution_str": solution,
            "ground_truth": task.ground_truth,
            "extra_info": {**task.extra_info, **further},
        }
        try:
            async with asyncio.timeout(REWARD_DEADLINE_S):
                value = await self._call(arguments)
        except TimeoutError as error:
            raise InfraFailure("reward", f"{self._name} took longer than {REWARD_DEADLINE_S:.0f} s") from error
        except Exception as error:
            raise InfraFailure("reward", f"{self._name} raised {type(error).__name__}: {error}") from error
        return _to_score(value, self._name)

    async def _call(self, arguments: Mapping[str, Any]) -> Any:
        started = time.monotonic()
        value = self._compute_score(**arguments)
        self._warn_if_slow(time.monotonic() - started)
        return await value if inspect.isawaitable(value) else value

    def _warn_if_slow(self, took_s: float) -> None:
        if took_s > SLOW_S and not self._warned:
            self._warned = True
            log.warning("%s blocked the worker for %.2f s; make it `async def`", self._name, took_s)


def _check_signature(function: Callable[..., Any], name: str) -> None:
    try:
        inspect.signature(function).bind(**dict.fromkeys(PARAMETERS))
    except TypeError as error:
        raise LoadError(f"reward {name} must take ({', '.join(PARAMETERS)}): {error}") from error


def _to_score(value: Any, name: str) -> Score:
    further: dict[str, float] = {}
    if isinstance(value, Mapping):
        if "score" not in value:
            raise InfraFailure("reward", f"{name} returned a dict without 'score' (keys: {', '.join(map(str, value))})")
        further = {f"reward/{key}": float(v) for key, v in value.items() if key != "score" and _is_number(v)}
        value = value["score"]
    if not _is_number(value):
        raise InfraFailure("reward", f"{name} returned {value!r}, not a finite number")
    return Score(float(value), further)


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, str | bytes) and math.isfinite(float(value))
    except (TypeError, ValueError):
        return False
