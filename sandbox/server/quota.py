"""How much each caller has at once. Refusals are immediate and say when to ask again; nothing was done then."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from penstock.sandbox.server.callers import Caller
from penstock.sandbox.server.errors import OverQuota

ASK_AGAIN_S = 1.0


class Quotas:
    def __init__(self) -> None:
        self.boxes: Counter[str] = Counter()
        """By caller: sessions open, and those being waited for, so that no caller fills the queue."""
        self.calls: Counter[str] = Counter()

    def take_box(self, caller: Caller) -> None:
        """Raises `OverQuota`. The taker calls `free_box`."""
        if self.boxes[caller.name] >= caller.max_boxes:
            raise OverQuota(f"{caller.name} has {caller.max_boxes} boxes, as many as it may", ASK_AGAIN_S)
        self.boxes[caller.name] += 1

    def free_box(self, caller: Caller) -> None:
        self.boxes[caller.name] -= 1

    def take_call(self, caller: Caller) -> None:
        """Raises `OverQuota`. The taker calls `free_call`."""
        if self.calls[caller.name] >= caller.max_calls:
            raise OverQuota(f"{caller.name} has {caller.max_calls} calls running, as many as it may", ASK_AGAIN_S)
        self.calls[caller.name] += 1

    def free_call(self, caller: Caller) -> None:
        self.calls[caller.name] -= 1

    @contextlib.contextmanager
    def call(self, caller: Caller) -> Iterator[None]:
        self.take_call(caller)
        try:
            yield
        finally:
            self.free_call(caller)
