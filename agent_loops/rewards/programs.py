"""Programs, run on test cases in a fresh sandbox session.

Not in the episode's own session: files that the policy left there could pass the tests. A tool whose result depends on
the episode's files gives its reward itself (`calc_reward`).

Test cases have the shapes of verl and PRIME, also as JSON text:

    {"inputs": [...], "outputs": [...]}                        the program reads stdin and prints
    {"inputs": [...], "outputs": [...], "fn_name": "solve"}    a function, or a method of ``Solution``, is called
    {"assert_case": ["assert add(1, 2) == 3", ...]}            assertions, see `assertions`; also a plain list of them

An input of a call is one JSON value per line, or a list.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.agent_loops.errors import InfraFailure
from penstock.agent_loops.rewards.assertions import Assertion, BadAssertion
from penstock.agent_loops.rewards.base import THINKING, Answer, BaseReward, Value
from penstock.sandbox import RunResult, Sandbox, Session

FENCED = re.compile(r"```(\w*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


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
        try:
            cases = read_cases(answer.ground_truth)
        except BadCases as error:
            raise InfraFailure("reward", f"code: {error}") from error
        cases = cases[: self._max_tests] if self._max_tests else cases
        program = program_of(answer.solution)
        if not program:
            return {"score": 0.0, "tests": len(cases), "passed": 0, "no_code": 1}
        session = await self._sandbox.start(f"reward {answer.data_source}")
        try:
            # Cases passed; without partial credit the first failure is the last test.
            passed, used_s = 0, 0.0
            for case in cases:
                if used_s >= self._budget_s:
                    break
                # Written anew each time: a test must not change what judges the next one.
                try:
                    await session.write_file("harness.py", Path(__file__).with_name("harness.py").read_bytes())
                    await session.write_file("solution.py", program.encode("utf-8", "replace"))
                except OSError:
                    if case is cases[0]:
                        raise
                    break  # the program has run in this box: what it did to it is its failure
                good, duration_s = await self._run(session, case)
                passed, used_s = passed + good, used_s + duration_s
                if not good and not self._partial:
                    break
        finally:
            await session.close()
        score = passed / len(cases) if self._partial else float(passed == len(cases))
        return {"score": score, "tests": len(cases), "passed": passed, "no_code": 0}

    async def _run(self, session: Session, case: ProgramCase) -> tuple[bool, float]:
        word = secrets.token_hex(16)
        job = json.dumps({"kind": case.kind, "given": case.for_harness(), "word": word})
        stdin = f"{job}\n{case.input if case.kind == 'stdin' else ''}"
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
    _, has_word, rest = result.stdout.rpartition(word)
    try:
        return json.loads(rest) if has_word else None
    except (ValueError, RecursionError):
        return None


def read_cases(ground_truth: Any) -> list[ProgramCase]:
    """Returns the test cases of a row. Raises `BadCases`."""
    tests = ground_truth
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError as error:
            raise BadCases(f"test cases are no JSON: {ground_truth[:100]!r}: {error}") from error
    if isinstance(tests, list):
        tests = {"assert_case": tests}
    if not isinstance(tests, Mapping):
        raise BadCases(f"test cases must be a mapping or a list of assertions, found {str(tests)[:100]!r}")
    try:
        cases = [ProgramCase("assert", text, Assertion.parse(text)) for text in tests.get("assert_case") or ()]
    except BadAssertion as error:
        raise BadCases(f"assertion {error}") from error
    inputs, outputs = tests.get("inputs") or [], tests.get("outputs") or []
    # verl gives assertions with as many empty inputs and outputs.
    cases = cases or _pairs(inputs, outputs, tests.get("fn_name"))
    if not cases:
        raise BadCases(f"no test cases: inputs, outputs and assert_case are empty (keys: {', '.join(map(str, tests))})")
    return cases


def _pairs(inputs: Any, outputs: Any, name: str | None) -> list[ProgramCase]:
    if len(inputs) != len(outputs):
        raise BadCases(f"{len(inputs)} inputs and {len(outputs)} outputs")
    if name:
        return [
            ProgramCase("call", {"name": name, "arguments": _arguments(arguments)}, _value(expected))
            for arguments, expected in zip(inputs, outputs, strict=True)
        ]
    return [
        ProgramCase("stdin", _text(arguments), _text(expected))
        for arguments, expected in zip(inputs, outputs, strict=True)
    ]


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(value: Any) -> list[Any]:
    if not isinstance(value, str):
        return list(value)
    try:
        return [json.loads(line) for line in value.split("\n") if line.strip()]
    except ValueError as error:
        raise BadCases(f"an input of a call is one JSON value per line, found {value[:100]!r}") from error


def _value(expected: Any) -> Any:
    try:
        return json.loads(expected) if isinstance(expected, str) else expected
    except ValueError:
        return expected


def same_value(value: Any, expected: Any) -> bool:
    """Returns True if both are equal as JSON, or if `expected` is a list whose only element is equal."""
    if value == expected or (
        isinstance(value, float) and isinstance(expected, int | float) and _close(value, expected)
    ):
        return True
    return isinstance(expected, list) and len(expected) == 1 and value == expected[0]


def same_text(output: str, expected: str) -> bool:
    """Equal line by line; spaces at line ends and empty last lines do not count, decimals may differ by rounding."""
    ours, theirs = ([line.split() for line in text.rstrip().splitlines()] for text in (output, expected))
    return len(ours) == len(theirs) and all(
        len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(ours, theirs, strict=True)
    )


def _same_word(word: str, expected: str) -> bool:
    try:
        return word == expected or ("." in word + expected and _close(float(word), float(expected)))
    except ValueError:
        return False


def _close(value: float, expected: float) -> bool:
    """numpy's `allclose`, with which PRIME compares."""
    return math.isclose(value, expected, rel_tol=1e-5, abs_tol=1e-8)


class BadCases(ValueError):
    """The row's ground truth has no test cases; the message shows its value."""


@dataclass(frozen=True, slots=True)
class ProgramCase:
    """One test. What is expected never enters the box: the program can read whatever is there."""

    kind: Literal["stdin", "call", "assert"]
    input: Any
    """stdin: text; call: {"name", "arguments"}; assert: the statement."""
    expected: Any = None
    """stdin: text; call: a value; assert: the `Assertion`."""

    def for_harness(self) -> Any:
        """The job's part that the box gets; the text of a program that reads stdin follows the job."""
        if self.kind == "stdin":
            return None
        return [asdict(step) for step in self.expected.steps] if self.kind == "assert" else self.input

    def passes(self, output: Any) -> bool:
        """`output`: what was printed, what the call returned, or the values that an assertion asked for."""
        if self.kind == "stdin":
            return same_text(str(output), str(self.expected))
        return bool(self.expected.holds(output)) if self.kind == "assert" else same_value(output, self.expected)
