"""The interface of rewards: an answer in, a number out. Infrastructure failures are raised, never scored.

`FunctionReward` wraps verl's ``compute_score(data_source, solution_str, ground_truth, extra_info)``.
"""

from __future__ import annotations

import inspect
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock.agent_loops.errors import LoadError
from penstock.sandbox import Sandbox
from penstock.tools import UserThreads

Value = float | Mapping[str, Any]
"""A finite number, or a mapping with ``score``; its other numbers become metrics."""
PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to score; the first four fields are verl's `compute_score` arguments."""

    data_source: str
    solution: str
    """Text of the last segment's response, special tokens left out."""
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    """The task's prompt."""


class BaseReward(ABC):
    """One object per agent worker, asked by all its episodes at once; made with the recipe's settings as keywords."""

    needs_sandbox: bool = False
    journaled: bool = True
    """The score is kept in the episode's journal: a worker that takes the episode over does not ask again. False for
    what costs less than a call of the queue and always gives the same."""

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        self.sandbox = sandbox

    @abstractmethod
    async def score(self, answer: Answer) -> Value:
        """Raises `InfraFailure`, or any other exception, on infrastructure failure; cancelled at its deadline."""

    def is_journaled(self, data_source: str) -> bool:
        """Returns True if scores of rows of this source are journaled."""
        return self.journaled

    def scored_by(self, data_source: str) -> Callable[..., Any]:
        """Returns the code that scores rows of this source: a failure names its file and line."""
        return self.score

    async def close(self) -> None:
        """Releases processes and connections; awaited once, when the worker ends."""


class FunctionReward(BaseReward):
    """Calls a plain function in a thread; one that cannot run there (signal handlers) in the event loop.

    Its scores are journaled, because it may ask a service, unless it has an attribute ``journaled = False``.
    """

    def __init__(
        self, compute_score: Callable[..., Any], name: str = "compute_score", *, journaled: bool = True
    ) -> None:
        """Raises `LoadError` where the function does not take verl's four arguments."""
        super().__init__()
        function = compute_score.func if isinstance(compute_score, partial) else compute_score
        self.journaled = bool(getattr(function, "journaled", journaled))
        try:
            inspect.signature(compute_score).bind(**dict.fromkeys(PARAMETERS))
        except TypeError as error:
            raise LoadError(f"reward {name} must take ({', '.join(PARAMETERS)}): {error}") from error
        self._compute_score = compute_score
        self._name = name
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        self._in_thread = not is_async
        self._threads = UserThreads(at_once=16)

    def scored_by(self, data_source: str) -> Callable[..., Any]:
        return self._compute_score

    async def score(self, answer: Answer) -> Value:
        arguments = (answer.data_source, answer.solution, answer.ground_truth, answer.extra_info)
        call = partial(self._compute_score, **dict(zip(PARAMETERS, arguments, strict=True)))
        if self._in_thread:
            try:
                returned = await self._threads.run(call, self._name)
            except ValueError as error:
                # What `signal.signal` says outside the main thread; timeouts of math graders are made with it.
                if "main thread" not in str(error):
                    raise
                self._in_thread = False
                message = "%s needs the main thread: it is called in the event loop and blocks the worker"
                log.warning(message, self._name)
                returned = call()
        else:
            returned = call()
        value: Value = await returned if inspect.isawaitable(returned) else returned
        return value
