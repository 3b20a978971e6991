"""The run's reward function: verl's ``compute_score``, sync or async, plain number or dict."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from penstock.agent_loops.errors import InfraFailure, LoadError
from penstock.agent_loops.load import load_object
from penstock.transfer_queue.trajectory import Task

REWARD_DEADLINE_S = 60.0
THREADS = 16
"""Plain functions run in these: one that computes, or waits, must not stop the other episodes."""
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

    A plain function is called in a thread; one that cannot be (it sets signal handlers) in the event loop, and says so.
    """

    def __init__(self, compute_score: Callable[..., Any], name: str = "compute_score") -> None:
        _check_signature(compute_score, name)
        self._compute_score = compute_score
        self._name = name
        self._in_thread = not _is_async(compute_score)

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
        call = partial(self._compute_score, **arguments)
        value = await self._in_a_thread(call) if self._in_thread else call()
        return await value if inspect.isawaitable(value) else value

    async def _in_a_thread(self, call: Callable[[], Any]) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(_pool(), call)
        except ValueError as error:
            # What `signal.signal` says outside the main thread; timeouts of math graders are made with it.
            if "main thread" not in str(error):
                raise
        self._in_thread = False
        log.warning("%s needs the main thread: it is called in the event loop and blocks the worker", self._name)
        return call()


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="reward")


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


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
