"""State that several tools of one episode share: a box, a connection."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
_SHARED: ContextVar[dict[Hashable, Any] | None] = ContextVar("what tools of this episode share", default=None)


@contextlib.contextmanager
def sharing(shared: dict[Hashable, Any]) -> Iterator[None]:
    """States that tools create inside this context share the entries of `shared`, which the episode's owner keeps."""
    token = _SHARED.set(shared)
    try:
        yield
    finally:
        _SHARED.reset(token)


def shared_in_episode(key: Hashable, default: T) -> T:
    """Return the episode's object under `key`; `default` if there is none yet, and outside of `sharing`."""
    shared = _SHARED.get()
    value: T = default if shared is None else shared.setdefault(key, default)
    return value
