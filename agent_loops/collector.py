"""Python's garbage collector beside ten thousand episodes.

An episode is some hundreds of objects that its end frees by itself; what the collector finds are rare cycles. Left as
it is, it looks at all living objects of a worker again and again, and the event loop stands still for it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

YOUNG = 50_000
"""New objects before the youngest are looked at; Python's own 700 is less than one episode's turn."""


@contextlib.contextmanager
def frozen_start() -> Iterator[None]:
    """What was there before (modules, tokenizer, template) is never looked at again; inside, collections are rarer."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
