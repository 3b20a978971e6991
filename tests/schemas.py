"""A server on a loop of its own, and its routes against their OpenAPI schema."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable


@contextlib.contextmanager
def in_thread(serving: contextlib.AbstractAsyncContextManager[str]) -> Iterator[str]:
    """The URL that `serving` yields; it runs in a thread, for clients that are not asynchronous."""
    ready: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def run() -> None:
        async with serving as url:
            stop = asyncio.Event()
            ready.set_result((url, asyncio.get_running_loop(), stop))
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    url, loop, stop = ready.result(120)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)


def try_out(
    operation: Any,
    mode: Any,
    headers: Mapping[str, str],
    *,
    examples: int,
    excluded: Sequence[Any] = (),
    prepare: Callable[[Any], None] = lambda _: None,
) -> None:
    """Sends `examples` generated cases, each after `prepare`, with all of schemathesis' checks but `excluded`."""

    @settings(max_examples=examples, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def conforms(case: Any) -> None:
        prepare(case)
        case.call_and_validate(headers=headers, timeout=120, excluded_checks=list(excluded))

    try:
        conforms()
    except Unsatisfiable:
        assert operation.body is None or not operation.body.items  # nothing in it that could be wrong
