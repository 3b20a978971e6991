"""A sink in its own thread: a slow disk or a network that hangs never holds a step up, a failure never ends it.

step, evaluation, … ──► queue (at most `MOST_WAITING`) ──► thread: make the sink, then call by call
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.trainer.sinks import SINKS, MakeSink, MetricSink, Record, SinkJob

logger = logging.getLogger(__name__)
MOST_WAITING = 1024
"""Calls that may wait; later ones are dropped, which is logged once."""
START_S = 15.0
"""Seconds that the start of a run waits for a sink: while its library is imported, nothing else should be."""
CLOSE_S = 20.0
"""Seconds that the end of a run waits for a sink."""
Call = Callable[[MetricSink], None]


class AsyncSink:
    """`MetricSink` around the one that `make` gives. Whatever that one does: making it ends within `START_S`, `close`
    within twice `CLOSE_S`, and every other call at once."""

    def __init__(self, name: str, make: MakeSink, job: SinkJob) -> None:
        self._name = name
        self._make, self._job = make, job
        self._calls: queue.Queue[Call | None] = queue.Queue(MOST_WAITING)
        self._broken, self._sink_ready = threading.Event(), threading.Event()
        self._told_dropped = False
        # A daemon: the process must be able to end while a library waits for its network.
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()
        self._sink_ready.wait(START_S)

    def rewind(self, step: int) -> None:
        self._put(lambda sink: sink.rewind(step))

    def step(self, version: int, metrics: Mapping[str, Any]) -> None:
        self._put(lambda sink: sink.step(version, metrics))

    def evaluation(self, version: int, values: Mapping[str, float]) -> None:
        self._put(lambda sink: sink.evaluation(version, values))

    def trajectories(self, step: int, records: Sequence[Record]) -> None:
        self._put(lambda sink: sink.trajectories(step, records))

    def close(self) -> None:
        """Waiting calls are still made, within `CLOSE_S`."""
        self._put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("trainer.sinks: %s was not done within %.0f s and is left", self._name, CLOSE_S)

    def _put(self, call: Call | None) -> None:
        if self._broken.is_set():
            return
        try:
            # The end may wait for room; nothing else may.
            self._calls.put(call, block=call is None, timeout=CLOSE_S)
        except queue.Full:
            if not self._told_dropped:
                logger.warning("trainer.sinks: %s does not keep up; some of its numbers are left out", self._name)
            self._told_dropped = True

    def _run(self) -> None:
        try:
            sink = self._make(self._job)
            self._sink_ready.set()
            while (call := self._calls.get()) is not None:
                call(sink)
            sink.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any library's failure is this sink's alone
            self._broken.set()
            self._sink_ready.set()
            logger.warning(
                "trainer.sinks: %s failed and is left out from here on, the run continues without it: %s: %s",
                *(self._name, type(error).__name__, error),
            )


def open_sinks(names: Sequence[str], job: SinkJob) -> list[MetricSink]:
    """Open the sinks that the recipe names; a recorder has ``jsonl`` by itself."""
    return [AsyncSink(name, SINKS.get(name), job) for name in dict.fromkeys(names) if name != "jsonl"]
