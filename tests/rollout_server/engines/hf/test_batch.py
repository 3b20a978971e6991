"""The batcher's decoding thread and the event loop, at the moment where they meet."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

pytest.importorskip("torch")

from penstock.rollout_server import Sampling
from penstock.rollout_server.engines.hf.batch import Batcher
from penstock.rollout_server.engines.hf.cache import Row
from penstock.rollout_server.engines.hf.sampling import Record

pytestmark = pytest.mark.torch


class Racing:
    """A batcher with one request, which the event loop cancels right after the decoding thread has looked."""

    def __init__(self, row: Row) -> None:
        self._arrived, self._waiting, self._running = deque[Row](), deque([row]), list[Row]()
        self._flag, self._looks = False, 0

    @property
    def _any_cancelled(self) -> bool:
        seen, self._looks = self._flag, self._looks + 1
        if self._looks == 1:
            self._waiting[0].cancelled = self._flag = True
        return seen

    @_any_cancelled.setter
    def _any_cancelled(self, value: bool) -> None:
        self._flag = value


def test_a_request_that_is_cancelled_while_the_thread_looks_is_dropped_at_its_next_look() -> None:
    batcher: Any = Racing(Row(Record(Sampling(), 1), ids=[1]))
    for _ in range(2):
        Batcher._receive(batcher)
    assert not batcher._waiting
