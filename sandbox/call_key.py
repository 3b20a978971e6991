"""Names for requests to a sandbox server, so that one that is sent again is not done again.

    with as_call("9f3c…/python.0"):            # the caller's: the same name in the worker that takes the episode over
        await session.run_python("x += 1")     # sent with the key of (call, what is asked, how often it was asked)

Requests outside of a call carry no key: sent twice, they are done twice.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

HEADER = "Idempotency-Key"


@dataclass(slots=True)
class _Call:
    name: str
    asked: Counter[bytes] = field(default_factory=Counter)


_CALL: ContextVar[_Call | None] = ContextVar("call of a tool", default=None)


@contextlib.contextmanager
def as_call(name: str) -> Iterator[None]:
    """Requests made inside belong to the call `name`, which must name one call and no other, ever."""
    token = _CALL.set(_Call(name))
    try:
        yield
    finally:
        _CALL.reset(token)


def current_call() -> str | None:
    """Name of the call that is under way: an idempotency key for services that a tool of yours asks itself."""
    call = _CALL.get()
    return call.name if call is not None else None


def request_key(*asked: bytes) -> str | None:
    """The key of one request; None outside of a call.

    Made of what is asked, not of the order of asking: requests that a tool sends side by side find their own answers.
    """
    call = _CALL.get()
    if call is None:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for part in (call.name.encode(), *asked):
        digest.update(len(part).to_bytes(8, "little") + part)
    call.asked[digest.digest()] += 1
    return f"{digest.hexdigest()}-{call.asked[digest.digest()]}"
