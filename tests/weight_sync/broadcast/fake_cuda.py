"""Streams and events of torch.cuda over the streams of `fake_nccl.c`: a copy ahead of a kernel finds old bytes.

What is submitted to a stream is done at once; until then the process waits for what is posted there.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def streams_of(library: str) -> Iterator[None]:
    """Replaces `torch.cuda.Stream`, `Event`, `stream`, `current_stream` and `set_device` in this process.

    `Stream.awaited` counts the operations of another stream that `wait_stream` makes a stream wait for.
    """
    native: Any = ctypes.CDLL(library)
    native.fakeStream.restype = ctypes.c_void_p
    for count in (native.fakeStreamPosted, native.fakeStreamDone):
        count.argtypes = [ctypes.c_void_p]

    chosen = threading.local()

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.cuda_stream = native.fakeStream()
            self.works = self.awaited = 0

        def wait_stream(self, other: Stream) -> None:
            self.awaited = other.works

        def is_done(self, posted: int) -> bool:
            return bool(native.fakeStreamDone(self.cuda_stream) >= posted)

        def query(self) -> bool:
            return self.is_done(native.fakeStreamPosted(self.cuda_stream))

    class Event:
        def record(self, stream: Stream) -> None:
            self._stream, self._posted = stream, native.fakeStreamPosted(stream.cuda_stream)

        def query(self) -> bool:
            return self._stream.is_done(self._posted)

    @contextmanager
    def stream(current: Stream) -> Iterator[None]:
        """Work that is submitted here begins after what is posted on the stream now."""
        posted, give_up_at = native.fakeStreamPosted(current.cuda_stream), time.monotonic() + 60
        while not current.is_done(posted):
            assert time.monotonic() < give_up_at, "the stream waits for a kernel that never ends"
            time.sleep(0.001)
        outer, chosen.stream = getattr(chosen, "stream", None), current
        try:
            yield
        finally:
            chosen.stream = outer
            current.works += 1

    changed = {"Stream": Stream, "Event": Event, "stream": stream}
    changed |= {"current_stream": lambda: getattr(chosen, "stream", None), "set_device": lambda device: None}
    with patch.multiple(torch.cuda, **changed):
        yield
