"""A first Ctrl-C ends the tests as their end does: fixtures are torn down, the summary is printed, nothing is left.

The signal is handled also where a shell has it ignored (below nohup, in the background). xdist's workers are told, and
the summary waits for them. What they leave is ended: processes by a mark in their environment, shared memory by who has
it mapped. Containers and Slurm are ended by scripts/test.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from penstock.common import guard

MARK = "TESTS_STARTED_BY"
GRACE_S = 60
"""For workers to tear their fixtures down, before the summary is printed without them."""
END_S = 10.0
"""Between SIGTERM and SIGKILL to what is left; redis-server and guards need some of it."""


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        _on_first_interrupt(lambda: None)
        return
    config.pluginmanager.register(Interruption(with_workers=bool(config.getoption("numprocesses", None))))


def _on_first_interrupt(prepare: Callable[[], None]) -> None:
    """Raises `KeyboardInterrupt` at the first signal only: another would break the teardown off."""

    def handle(*_: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        prepare()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)


class Interruption:
    """Of the process that prints; with xdist its workers run the tests."""

    def __init__(self, with_workers: bool) -> None:
        self._interrupted = False
        self._with_workers = with_workers
        self._segments = guard.Segments()
        self._mark = os.environ[MARK] = secrets.token_hex(8)
        if with_workers:
            signal.signal(signal.SIGINT, self._tell_workers)
        else:
            _on_first_interrupt(self._look)

    def _tell_workers(self, *_: Any) -> None:
        self._look()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second one waits for nobody
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.alarm(GRACE_S)
        for worker in psutil.Process().children():
            worker.send_signal(signal.SIGINT)

    def _look(self) -> None:
        self._interrupted = True
        for process in self._left():
            self._segments.add(process.pid)

    def _left(self) -> list[psutil.Process]:
        """Living processes that were started below this one, whoever their parents are by now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return [process for process in found if process.pid != os.getpid()]

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, report: pytest.TestReport) -> None:
        """Report a test that the interrupt broke off in a worker as skipped."""
        if self._interrupted:
            report.outcome = "skipped"
            report.longrepr = (report.nodeid, 0, "Skipped: interrupted")

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        if not self._interrupted:
            return
        signal.alarm(0)
        self._look()
        for process in (left := self._left()):
            process.terminate()
        psutil.wait_procs(left, END_S)
        give_up_at = time.monotonic() + END_S
        while (left := self._left()) and time.monotonic() < give_up_at:  # one may have started another
            for process in left:
                process.kill()
            psutil.wait_procs(left, 1.0)
        self._segments.remove()
