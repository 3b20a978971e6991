"""Waiting for results: one look at Redis for all requests that are waited for, however many there are."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter

from penstock.transfer_queue import QueueUnavailable, RequestLog

POLL_S = 0.02
logger = logging.getLogger(__name__)


class Futures:
    """`run` in a task of its own."""

    def __init__(self, requests: RequestLog) -> None:
        self._requests = requests
        self._awaited: Counter[str] = Counter()
        self._looked = asyncio.Condition()
        self._done: set[str] = set()

    async def wait(self, request_id: str, timeout_s: float) -> None:
        """Returns when the request has a result, or after `timeout_s`."""
        self._awaited[request_id] += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s), self._looked:
                    await self._looked.wait_for(lambda: request_id in self._done)
        finally:
            self._awaited[request_id] -= 1
            if not self._awaited[request_id]:
                del self._awaited[request_id]
                self._done.discard(request_id)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            if not self._awaited:
                continue
            try:
                done = await self._requests.done(list(self._awaited))
            except QueueUnavailable as error:
                logger.warning("results are waited for: %s", error)
                continue
            if done:
                async with self._looked:
                    self._done |= done & self._awaited.keys()
                    self._looked.notify_all()
