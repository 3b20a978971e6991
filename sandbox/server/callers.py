"""Who may ask: tokens from the environment, each with its limits."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.protocol import SandboxError

RUN = "run"
"""The caller who holds the run's own token: it waits for boxes as long as the queue allows, and is never refused."""
ANY_NUMBER = 1 << 30


@dataclass(frozen=True, slots=True)
class Caller:
    name: str
    token: str
    max_boxes: int
    max_calls: int


def callers_of(config: SandboxConfig, token: str, environment: Mapping[str, str]) -> tuple[Caller, ...]:
    """Raises `SandboxError` where a token is missing, or two callers have the same."""
    if not token:
        raise SandboxError("the sandbox server needs a token")
    callers = [Caller(RUN, token, ANY_NUMBER, config.server.max_calls)]
    for name, one in config.server.callers.items():
        given = environment.get(one.token_env, "")
        if not given:
            raise SandboxError(f"sandbox.server.callers.{name}: {one.token_env} is not set in the environment")
        callers.append(Caller(name, given, one.max_boxes, one.max_calls))
    if len({caller.token for caller in callers}) < len(callers) or RUN in config.server.callers:
        raise SandboxError("sandbox.server.callers: each needs a token of its own, and a name that is not 'run'")
    return tuple(callers)


def find_caller(callers: Iterable[Caller], authorization: bytes) -> Caller | None:
    """Compares with every token, each in constant time."""
    found = None
    for caller in callers:
        if hmac.compare_digest(authorization, f"Bearer {caller.token}".encode()):
            found = caller
    return found
