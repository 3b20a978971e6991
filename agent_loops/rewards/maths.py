"""Mathematical answers, compared by the library math-verify: ``0.5``, ``1/2`` and ``\\frac{1}{2}`` are one answer.

The library works in processes of its own. Its own time limits are signals, which fail outside a main thread; here the
operating system ends a process that takes too much CPU time or memory. What was to be compared has caused that, not the
machine: the answer is wrong, and counted. A process that is late or ends for another reason is a failure.
"""

from __future__ import annotations

import importlib.util
import math
import signal
from typing import Any

from penstock.agent_loops.errors import InfraFailure
from penstock.agent_loops.rewards.base import Answer, BaseReward, Value
from penstock.agent_loops.rewards.processes import LineProcesses, ProcessEnded
from penstock.sandbox import Sandbox

TAIL_CHARS = 4000
"""The answer is looked for in the last part of the text."""
WALL_DEADLINE_S = 50.0
"""Under the CPU limit a process answers or dies by itself; past this the machine is not well."""
PROGRAM = "penstock.agent_loops.rewards.maths_process"


class Maths(BaseReward):
    """`right` or `wrong`; metrics `unreadable` (no answer was found) and `too_costly`."""

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        *,
        right: float = 1.0,
        wrong: float = 0.0,
        processes: int = 2,
        cpu_s: float = 5.0,
        memory_mb: int = 2048,
    ) -> None:
        """Raises `ValueError` where math-verify is not installed.

        Args:
            processes: graders of this worker; each holds about 90 MB.
            cpu_s: of one answer, rounded up to whole seconds.
            memory_mb: address space of a grader.
        """
        super().__init__(sandbox)
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError("it needs the package math-verify: pip install 'penstock[math]'")
        self._right, self._wrong = right, wrong
        self._graders = LineProcesses(PROGRAM, (str(math.ceil(cpu_s)), str(memory_mb)), processes)

    async def score(self, answer: Answer) -> Value:
        verdict = await self._verdict(str(answer.ground_truth), answer.solution[-TAIL_CHARS:])
        if verdict.get("bad_reference"):
            raise InfraFailure("reward", f"maths: no answer in the ground truth {str(answer.ground_truth)[:200]!r}")
        unreadable, costly = float(verdict.get("unreadable", False)), float(verdict.get("too_costly", False))
        score = self._right if verdict.get("equal") else self._wrong
        return {"score": score, "unreadable": unreadable, "too_costly": costly}

    async def close(self) -> None:
        await self._graders.close()

    async def _verdict(self, reference: str, solution: str) -> dict[str, Any]:
        try:
            return await self._graders.ask({"reference": reference, "solution": solution}, WALL_DEADLINE_S)
        except ProcessEnded as error:
            if error.code != -signal.SIGXCPU:
                raise InfraFailure("reward", f"maths: a grader ended with {error.code}") from error
            return {"too_costly": True}
