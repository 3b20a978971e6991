"""Worker and trainer processes of a stage: started, awaited, killed, and told apart by how they ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import penstock

TESTS = Path(__file__).resolve().parents[1]
SOURCES = Path(penstock.__file__).resolve().parents[1]
KILLED = -signal.SIGKILL


class ProcessFailed(AssertionError):
    """A process ended in a way that no fault of ours explains."""


class Process:
    """``python -m faults.MODULE PLAN NAME …``; what it prints goes to ``NAME.log``."""

    def __init__(self, name: str, log: Path, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._log = log
        self._process = process

    @classmethod
    async def start(cls, module: str, plan_file: Path, name: str, *options: str) -> Process:
        log = plan_file.parent / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", f"faults.{module}", str(plan_file), name, *options),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": f"{SOURCES}{os.pathsep}{TESTS}"},
            )
        return cls(name, log, process)

    async def wait(self) -> int:
        """Its exit code; negative where a signal ended it."""
        return await self._process.wait()

    def signal(self, number: signal.Signals) -> bool:
        """False where it has ended already."""
        if self._process.returncode is not None:
            return False
        self._process.send_signal(number)
        return True

    async def end(self) -> None:
        """SIGKILL where it still runs."""
        self.signal(signal.SIGKILL)
        await self._process.wait()

    def failure(self, code: int) -> ProcessFailed:
        return ProcessFailed(f"{self.name} ended with {code}:\n{self._log.read_text(encoding='utf-8')[-4000:]}")
