"""Callers: tokens from the environment, each with its quota.

Refusals for quota are immediate and say when to try again; nothing was done then.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from penstock.common import same_token
from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.protocol import SandboxError
from penstock.sandbox.server.views import OverQuota

RUN = "run"
"""The caller with the run's own token: it waits for boxes as long as the queue allows, and is never refused."""
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Caller:
    name: str
    token: str
    max_boxes: int
    max_calls: int


def callers_of(config: SandboxConfig, token: str, environment: Mapping[str, str]) -> tuple[Caller, ...]:
    """Returns the callers with their tokens. Raises `SandboxError` if a token is missing or used twice."""
    if not token:
        raise SandboxError("the sandbox server needs a token")
    callers = [Caller(RUN, token, max_boxes=sys.maxsize, max_calls=sys.maxsize)]
    for name, one in config.server.callers.items():
        caller_token = environment.get(one.token_env, "")
        if not caller_token:
            raise SandboxError(f"sandbox.server.callers.{name}: {one.token_env} is not set in the environment")
        callers.append(Caller(name, caller_token, one.max_boxes, one.max_calls))
    if len({caller.token for caller in callers}) < len(callers) or RUN in config.server.callers:
        raise SandboxError("sandbox.server.callers: each needs its own token, and a name that is not 'run'")
    return tuple(callers)


def find_caller(callers: Iterable[Caller], token: str) -> Caller | None:
    """Returns the caller with this token, else None. Compares with every token, each in constant time."""
    match = None
    for caller in callers:
        if same_token(token, caller.token):
            match = caller
    return match


class Quotas:
    """Boxes and calls in use, by caller."""

    def __init__(self) -> None:
        self.boxes: Counter[str] = Counter()
        """Sessions open, and those being waited for, so that no caller fills the queue."""
        self.calls: Counter[str] = Counter()

    def take_box(self, caller: Caller) -> None:
        """Raises `OverQuota`. The taker calls `free_box`."""
        if self.boxes[caller.name] >= caller.max_boxes:
            raise OverQuota(f"{caller.name} has {caller.max_boxes} boxes, its quota", RETRY_AFTER_S)
        self.boxes[caller.name] += 1

    def free_box(self, caller: Caller) -> None:
        self.boxes[caller.name] -= 1

    @contextlib.contextmanager
    def call(self, caller: Caller) -> Iterator[None]:
        """Counts a running call. Raises `OverQuota`."""
        if self.calls[caller.name] >= caller.max_calls:
            raise OverQuota(f"{caller.name} has {caller.max_calls} calls running, its quota", RETRY_AFTER_S)
        self.calls[caller.name] += 1
        try:
            yield
        finally:
            self.calls[caller.name] -= 1
