"""Programs, run on test cases in a fresh box of the run's sandbox.

Not in the episode's own box: what the policy left there could pass the tests for it. A tool whose result depends on the
episode's files gives its reward itself (`calc_reward`).
"""

from __future__ import annotations

import json
import re
import secrets
from pathlib import Path
from typing import Any

from penstock.agent_loops.errors import InfraFailure
from penstock.agent_loops.rewards.base import Answer, BaseReward, Value
from penstock.agent_loops.rewards.cases import BadCases, Case, read_cases
from penstock.sandbox import RunResult, Sandbox, Session

THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)
FENCED = re.compile(r"```(\w*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
HARNESS = Path(__file__).with_name("harness.py")


class Programs(BaseReward):
    """1 where all tests pass, else 0, or the share that passed; metrics `tests`, `passed` and `no_code`."""

    needs_sandbox = True

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        *,
        partial: bool = False,
        timeout_s: float = 5.0,
        budget_s: float = 30.0,
        max_tests: int = 0,
    ) -> None:
        """
        Args:
            partial: the share of passed tests instead of all or nothing; every test is then run.
            timeout_s: of one test.
            budget_s: running time of all tests together; those that are left then count as failed.
            max_tests: only the first ones are run; 0 runs all.
        """
        super().__init__(sandbox)
        assert sandbox is not None
        self._sandbox = sandbox
        self._partial = partial
        self._timeout_s, self._budget_s = timeout_s, budget_s
        self._max_tests = max_tests

    async def score(self, answer: Answer) -> Value:
        """Raises `SandboxError`, and `InfraFailure` where the row has no test cases."""
        cases = self._cases(answer)
        program = program_of(answer.solution)
        if not program:
            return {"score": 0.0, "tests": len(cases), "passed": 0, "no_code": 1}
        session = await self._sandbox.start(f"reward {answer.data_source}")
        try:
            passed = await self._run_all(session, program, cases)
        finally:
            await session.close()
        score = passed / len(cases) if self._partial else float(passed == len(cases))
        return {"score": score, "tests": len(cases), "passed": passed, "no_code": 0}

    def _cases(self, answer: Answer) -> list[Case]:
        try:
            cases = read_cases(answer.ground_truth)
        except BadCases as error:
            raise InfraFailure("reward", f"code: {error}") from error
        return cases[: self._max_tests] if self._max_tests else cases

    async def _run_all(self, session: Session, program: str, cases: list[Case]) -> int:
        """Cases passed; without partial credit the first failure is the last test."""
        passed, used_s = 0, 0.0
        for case in cases:
            if used_s >= self._budget_s:
                break
            # Written anew each time: a test must not change what judges the next one.
            await session.write_file("harness.py", HARNESS.read_bytes())
            await session.write_file("solution.py", program.encode("utf-8", "replace"))
            good, duration_s = await self._run(session, case)
            passed, used_s = passed + good, used_s + duration_s
            if not good and not self._partial:
                break
        return passed

    async def _run(self, session: Session, case: Case) -> tuple[bool, float]:
        word = secrets.token_hex(16)
        job = json.dumps({"kind": case.kind, "given": None if case.kind == "stdin" else case.given, "word": word})
        stdin = f"{job}\n{case.given if case.kind == 'stdin' else ''}"
        # -I: no module that an earlier test left in the folder, or in the user's packages, comes before the library's.
        result = await session.run(["python3", "-I", "harness.py"], stdin=stdin, timeout_s=self._timeout_s)
        output = result.stdout if case.kind == "stdin" else _behind(word, result)
        return result.exit_code == 0 and result.limit is None and case.passes(output), result.duration_s


def program_of(solution: str) -> str:
    """The last fenced block that is Python or names no language; the whole text where nothing is fenced."""
    text = THINKING.sub("", solution)
    blocks = FENCED.findall(text)
    programs = [block for language, block in blocks if language.lower() in ("", "python", "python3", "py")]
    if programs:
        return str(programs[-1])
    return "" if blocks else text.strip()


def _behind(word: str, result: RunResult) -> Any:
    _, found, rest = result.stdout.rpartition(word)
    try:
        return json.loads(rest) if found else None
    except ValueError:
        return None
