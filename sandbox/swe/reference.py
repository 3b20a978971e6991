"""What a task's reference patch proves: which changed values its tests notice, which data files may be hidden.

Learnt once per task and process, in boxes of its own. A decoy that is not certain by itself (a parameter's value, a
constant, a data file) is used only where the reference patch, which passes the task's tests, fails the changed ones
and passes the others.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from penstock.sandbox.swe.data_files import STRATEGIES, Strategy, changed_data, hidden_data
from penstock.sandbox.swe.decoys import BoxChanges, Decoys, function_of, names_in, only_turned, without_parameters
from penstock.sandbox.swe.expectations import Name, apply_all, compared_parameters, open_edits, wrong_tests
from penstock.sandbox.swe.run_tests import GradingRun
from penstock.sandbox.swe.task import SweTask

ATTEMPTS = (*((strategy, 1.0) for strategy in STRATEGIES[:-1]), *[(STRATEGIES[-1], 0.4)] * 2)
"""How values of data files are tried: all likely expectations at once, and some of all values, since a test whose input
changed shows nothing about what it expects."""
REFERENCE_RUNS = 1 + 1 + len(ATTEMPTS) + 1
"""Runs of the reference patch before its first plan: with data files hidden, without, one per attempt, all else."""
PLANS_PER_ROUND = 2
"""Proven plans that are kept, for each round of a grading: later gradings choose among them."""
Run = Callable[[bytes, BoxChanges], Awaitable[GradingRun]]
"""Runs the task's tests with a patch in a fresh box that has these changes."""


@lru_cache(maxsize=512)
def reference_of(task: SweTask) -> Reference:
    return Reference(task)


class Reference:
    """The proofs of one task. Gradings of the task share them; the first grading waits for them."""

    def __init__(self, task: SweTask) -> None:
        self.data = hidden_data(task)
        self.hidden: tuple[str, ...] = ()
        """Data files that the tests read while they are collected: they are taken away before the first test runs."""
        self.reached: frozenset[str] = frozenset()
        """Tests of which an expected value can be changed."""
        self._task = task
        self._base: GradingRun | None = None
        self._strategy: Strategy | None = None
        self._by_data: frozenset[Name] = frozenset()
        self._plans: list[Decoys] = []
        self._learnt = False
        self._learning = asyncio.Lock()

    async def learn(self, run: Run) -> None:
        """Nothing is proven by a reference patch that does not pass. Raises what `run` raises."""
        async with self._learning:
            if not self._learnt:
                for hidden in dict.fromkeys((self.data, ())):
                    passed = await run(self._task.patch, BoxChanges(hidden=hidden, observe=True))
                    if passed.grade.resolved:
                        self.hidden, self._base = hidden, passed
                        await self._learn_data(run, passed)
                        self.reached = frozenset(self._wrong_of(await self._try(run, passed, 1.0)))
                        break
                self._learnt = True

    async def _learn_data(self, run: Run, base: GradingRun) -> None:
        """Finds the strategy that changes what tests expect of data files."""
        for strategy, odds in ATTEMPTS if self._data_of(base) else ():
            changes = BoxChanges(changed_data(self._data_of(base), strategy, random.SystemRandom(), odds))
            if changes.files and (decoys := await self._proven(run, base, changes)).wrong:
                self._strategy = strategy
                self._by_data = frozenset(function_of(test) for test in decoys.wrong)
                return

    async def plans(self, run: Run, rounds: int) -> list[Decoys]:
        """Up to `rounds` proven plans; none where no value can be changed. Raises what `run` raises."""
        await self.learn(run)
        if self._base is None or not self.reached:
            return []
        async with self._learning:
            for _ in range(2 * rounds):
                if len(self._plans) >= rounds * PLANS_PER_ROUND:
                    break
                decoys = await self._try(run, self._base, 0.5)
                self._plans += [decoys] if decoys.wrong else []
                if len(self._plans) >= rounds:
                    break
        return random.SystemRandom().sample(self._plans, min(rounds, len(self._plans)))

    async def _try(self, run: Run, base: GradingRun, odds: float) -> Decoys:
        dice = random.SystemRandom()
        files: dict[str, bytes] = {}
        parameters: dict[str, tuple[str, ...]] = {}
        if self._strategy is not None:
            files |= changed_data(self._data_of(base), self._strategy, dice, odds)
        for path, data in base.files.items():
            names = names_in(path, self._task.fail_to_pass) - self._by_data
            if names and path not in self.data:
                files[path], changed = _change_tests(data, names, dice, odds)
                parameters |= {"::".join((path, *name)): values for name, values in changed.items()}
        changes = BoxChanges(files, parameters, odds, dice.randrange(1 << 30))
        return await self._proven(run, base, changes)

    async def _proven(self, run: Run, base: GradingRun, changes: BoxChanges) -> Decoys:
        """The tests that the reference patch fails with these changes, and those that it passes."""
        changes = replace(changes, hidden=self.hidden)
        seen = await run(self._task.patch, replace(changes, observe=True))
        renamed = {} if seen.ran.doubt else self._same_tests(base, seen)
        outcomes = {test: seen.ran.outcomes.get(now, "missing") for test, now in renamed.items()}
        tests = [test for test in self._task.fail_to_pass if test in outcomes]
        wrong = tuple(test for test in tests if outcomes[test] == "failed")
        right = tuple(test for test in tests if outcomes[test] == "passed")
        return Decoys(changes, wrong, right, {test: now for test, now in renamed.items() if test != now})

    def _same_tests(self, base: GradingRun, seen: GradingRun) -> dict[str, str]:
        """Ids before → now. By place in their function, since a value may be part of an id.

        Tests of which something else than an expectation changed are left out: what a right patch does there is open.
        """
        now = _by_function(seen)
        same: dict[str, str] = {}
        for function, tests in _by_function(base).items():
            path, name = function.partition("::")[0], function_of(function)
            expected = set(compared_parameters(base.files.get(path, b""), {name}).get(name, ()))
            if len(now.get(function, ())) == len(tests):
                for (test, before), (other, after) in zip(tests, now[function], strict=True):
                    changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
                    same |= {test: other} if changed <= expected else {}
        return same

    def _data_of(self, base: GradingRun) -> dict[str, bytes]:
        return {path: base.files[path] for path in self.data if path in base.files}

    def _wrong_of(self, decoys: Decoys) -> set[str]:
        """Without those that merely compare the other way round."""
        files = self._base.files if self._base is not None else {}
        sources = {path: data for path, data in files.items() if path not in self.data}
        turned = only_turned(self._task.fail_to_pass, sources)
        open_ones = {
            test
            for test in turned
            if function_of(test) in self._by_data
            or is_open(sources.get(test.partition("::")[0], b""), {function_of(test)})
        }
        return {test for test in decoys.wrong if test not in turned or test in open_ones}


def is_open(data: bytes, names: set[Name]) -> bool:
    """A test of these takes expected values from its parameters or from a constant."""
    return bool(compared_parameters(data, names) or open_edits(data, names, random.Random(0), 1.0))


def _change_tests(
    data: bytes, names: set[Name], dice: random.Random, odds: float
) -> tuple[bytes, dict[Name, tuple[str, ...]]]:
    """A test file with other expectations, and the parameters that are to be changed when it is collected."""
    edits = open_edits(data, names, dice, odds)
    written = {name for name in names if open_edits(data, {name}, dice, 1.0)}
    parameters = compared_parameters(data, names - written)
    certain = wrong_tests(data, names - written - set(parameters), dice)
    edits += [edit for edit in certain.values() if dice.random() < odds]
    return apply_all(data, edits), parameters


def _by_function(run: GradingRun) -> dict[str, Sequence[tuple[str, Mapping[str, str]]]]:
    tests: dict[str, list[tuple[str, Mapping[str, str]]]] = defaultdict(list)
    for test, digests in run.ran.collected:
        tests[without_parameters(test)].append((test, digests))
    return dict(tests)
