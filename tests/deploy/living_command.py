"""A `penstock` command in a process of its own, as a person starts it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.living import living_below


class LivingCommand:
    def __init__(self, folder: Path, *words: str, **env: str) -> None:
        self.out, self.log = folder / "out.txt", folder / "log.txt"
        command = [sys.executable, "-m", "penstock.deploy.cli", *words]
        with self.out.open("wb") as out, self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=log, cwd=folder, start_new_session=True, env={**os.environ, **env}
            )

    def finish(self, status: int = 0, timeout_s: float = 900) -> str:
        """What it printed."""
        assert self.process.wait(timeout_s) == status, self.log.read_text()[-4000:]
        return self.out.read_text()

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 600) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.02)

    def pids(self, *words: str) -> list[int]:
        """Living processes below it whose command line holds the words."""
        return [process.pid for process in living_below(self.process.pid, *words)]

    def kill(self) -> None:
        """SIGKILL to it and to all below it."""
        for pid in [self.process.pid, *self.pids()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(60)


@contextlib.contextmanager
def commands(folder: Path) -> Iterator[Callable[..., LivingCommand]]:
    """Starts commands in a folder; they end with the block."""
    started: list[LivingCommand] = []

    def start(*words: str, folder: Path = folder, **env: str) -> LivingCommand:
        started.append(LivingCommand(folder, *words, **env))
        return started[-1]

    try:
        yield start
    finally:
        for one in started:
            if one.process.poll() is None:
                one.process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.process.wait(60)
                one.kill()


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
