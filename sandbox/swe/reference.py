"""Facts that a task's reference patch proves: the changed values that its tests notice, the data files that may be
hidden.

Learnt once per task and process, in separate boxes. A decoy that is not certain by itself (a parameter's value, a
constant, a data file) is used only where the reference patch, which passes the task's tests, fails the changed ones
and passes the others.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from penstock.sandbox.swe.data_files import STRATEGIES, Strategy, changed_data, hidden_data
from penstock.sandbox.swe.decoys import (
    BoxChanges,
    Round,
    certain_rounds,
    fixed_dice,
    function_of,
    names_in,
    only_turned,
    without_parameters,
)
from penstock.sandbox.swe.expectations import (
    Name,
    apply_all,
    compared_parameters,
    open_edits,
    other_value,
    wrong_tests,
)
from penstock.sandbox.swe.grading_box import GradingBoxes, GradingRun
from penstock.sandbox.swe.report import ParameterValues
from penstock.sandbox.swe.task import SweTask

ROOM = 16.0
"""Time limits of the reference patch, in those of the task."""
ATTEMPTS = (*((strategy, 1.0) for strategy in STRATEGIES[:-1]), *[(STRATEGIES[-1], 0.4)] * 2)
"""Attempts at the values of data files: all likely expectations at once, then a random part of all values, since a test
whose input changed shows nothing about its expectation."""
REFERENCE_RUNS = 1 + 1 + 1 + len(ATTEMPTS) + 1
"""Boxes before a task's first grading: hidden tests read, data files hidden, not hidden, one per attempt, all else."""


@lru_cache(maxsize=512)
def reference_of(task: SweTask) -> Reference:
    return Reference(task)


class Reference:
    """The proofs of one task. Gradings of the task share them; the first grading waits for them."""

    def __init__(self, task: SweTask) -> None:
        self.reached: frozenset[str] = frozenset()
        """Tests of which an expected value can be changed."""
        self._task = task
        self._data = hidden_data(task)
        self._dice = fixed_dice(task)
        self._files: Mapping[str, bytes] = {}
        """Hidden tests and their data."""
        self._hidden: tuple[str, ...] = ()
        """Data files that the tests read while they are collected: they are taken away before the first test runs."""
        self._base: GradingRun | None = None
        self._strategy: Strategy | None = None
        self._by_data: frozenset[Name] = frozenset()
        self._plans: list[Round] = []
        self._learnt = False
        self._learning = asyncio.Lock()

    @property
    def sources(self) -> dict[str, bytes]:
        """Hidden tests without their data; empty before the first `rounds`."""
        return {path: data for path, data in self._files.items() if path not in self._data}

    @property
    def _data_files(self) -> dict[str, bytes]:
        return {path: data for path, data in self._files.items() if path in self._data}

    async def rounds(self, boxes: GradingBoxes, count: int) -> list[Round]:
        """The true round and `count` others: proven ones where tests take expectations from elsewhere than their own
        text, else what is certain. Raises what `boxes.run` raises."""
        boxes = boxes.with_limits_times(ROOM)
        async with self._learning:
            if not self._learnt:
                await self._learn(boxes)
                self._learnt = True
            others = await self._proven_rounds(boxes, count) or certain_rounds(self._task, self.sources, count)
        rounds = [Round.true(self._task, BoxChanges()), *others]
        return [replace(one, changes=self._whole(one.changes)) for one in rounds]

    async def on_this_machine(self, boxes: GradingBoxes) -> GradingBoxes:
        """Boxes with longer limits where the reference patch, run once more, comes near those of `boxes` now."""
        if not self._task.patch.strip():
            return boxes
        seen = await boxes.with_limits_times(ROOM).run(self._task.patch, self._whole(BoxChanges()))
        if seen.used >= 1:  # it shows nothing
            return boxes
        # Four times what the reference patch uses, if that is more than the task's limits.
        return boxes.with_limits_times(max(1.0, 4.0 * ROOM * seen.used))

    def _whole(self, changes: BoxChanges) -> BoxChanges:
        """Return the changes that every box gets, with these differences."""
        values = self._base.ran.parameters if self._base is not None else {}
        values = {test: rows for test, rows in values.items() if function_of(test) not in self._by_data}
        return BoxChanges({**self._files, **changes.files}, {**values, **changes.parameters}, self._hidden)

    async def _learn(self, boxes: GradingBoxes) -> None:
        """Nothing is proven by a reference patch that does not pass."""
        self._files = await boxes.read()
        turned = only_turned(self._task.fail_to_pass, self._files)
        is_open = any(_is_open(data, names_in(path, turned)) for path, data in self.sources.items())
        if not self._task.patch.strip() or not (self._data or is_open):
            return
        for hidden in dict.fromkeys((self._data, ())):
            changes = replace(self._whole(BoxChanges()), hidden=hidden, observed=self._computed())
            passed = await boxes.run(self._task.patch, changes)
            if passed.grade.resolved:
                self._hidden = hidden
                await self._learn_data(boxes, passed)
                self._base = passed  # not before: its values would cover those that tests read from data files
                self.reached = frozenset(self._wrong_of(await self._try(boxes, passed, 1.0)))
                return

    def _computed(self) -> dict[str, tuple[str, ...]]:
        """Parameters that are expectations and whose values are not written in the file, by test function."""
        return {
            "::".join((path, *name)): parameters
            for path, data in self.sources.items()
            for name, parameters in compared_parameters(data, names_in(path, self._task.fail_to_pass)).items()
            if not open_edits(data, {name}, random.Random(0), 1.0)
        }

    async def _learn_data(self, boxes: GradingBoxes, base: GradingRun) -> None:
        """Finds the strategy that changes what tests expect of data files."""
        for strategy, odds in ATTEMPTS:
            changes = BoxChanges(changed_data(self._data_files, strategy, random.SystemRandom(), odds))
            if changes.files and (one := await self._proven(boxes, base, changes)).wrong:
                self._strategy = strategy
                self._by_data = frozenset(function_of(test) for test in one.wrong)
                return

    async def _proven_rounds(self, boxes: GradingBoxes, count: int) -> list[Round]:
        """Up to `count`; none where no value can be changed."""
        if self._base is None or not self.reached:
            return []
        for _ in range(2 * count):
            # Two proven plans are kept for each round of a grading: later gradings choose among them.
            if len(self._plans) >= count * 2:
                break
            one = await self._try(boxes, self._base, 0.5)
            self._plans += [one] if one.wrong else []
            if len(self._plans) >= count:
                break
        return random.SystemRandom().sample(self._plans, min(count, len(self._plans)))

    async def _try(self, boxes: GradingBoxes, base: GradingRun, odds: float) -> Round:
        dice, files = self._dice, dict[str, bytes]()
        if self._strategy is not None:
            files |= changed_data(self._data_files, self._strategy, dice, odds)
        for path, data in self.sources.items():
            names = names_in(path, self._task.fail_to_pass) - self._by_data
            names -= {function_of(test) for test in base.ran.parameters}
            files[path] = _changed_tests(data, names, dice, odds)
        parameters = {
            test: _changed_values(rows, dice, odds)
            for test, rows in base.ran.parameters.items()
            if function_of(test) not in self._by_data
        }
        return await self._proven(boxes, base, BoxChanges(files, parameters))

    async def _proven(self, boxes: GradingBoxes, base: GradingRun, changes: BoxChanges) -> Round:
        """The tests that the reference patch fails with these changes, and those that it passes."""
        seen = await boxes.run(self._task.patch, replace(self._whole(changes), observed={}))
        renamed = {} if seen.ran.doubt else self._same_tests(base, seen)
        outcomes = {test: seen.ran.outcomes.get(now, "missing") for test, now in renamed.items()}
        tests = [test for test in self._task.fail_to_pass if test in outcomes]
        wrong = tuple(test for test in tests if outcomes[test] == "failed")
        right = tuple(test for test in tests if outcomes[test] == "passed")
        return Round(changes, wrong, right, {test: now for test, now in renamed.items() if test != now})

    def _same_tests(self, base: GradingRun, seen: GradingRun) -> dict[str, str]:
        """Ids before → now. By place in their function, since a value may be part of an id.

        Tests of which something else than an expectation changed are left out: what a right patch does there is open.
        """
        now = _by_function(seen)
        same: dict[str, str] = {}
        for function, tests in _by_function(base).items():
            path, name = function.partition("::")[0], function_of(function)
            expected = set(compared_parameters(self._files.get(path, b""), {name}).get(name, ()))
            if len(now.get(function, ())) == len(tests):
                for (test, before), (other, after) in zip(tests, now[function], strict=True):
                    changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
                    same |= {test: other} if changed <= expected else {}
        return same

    def _wrong_of(self, one: Round) -> set[str]:
        """Without those that merely compare the other way round."""
        turned = only_turned(self._task.fail_to_pass, self.sources)
        open_ones = {
            test
            for test in turned
            if function_of(test) in self._by_data
            or _is_open(self.sources.get(test.partition("::")[0], b""), {function_of(test)})
        }
        return {test for test in one.wrong if test not in turned or test in open_ones}


def _is_open(data: bytes, names: set[Name]) -> bool:
    """A test of these takes expected values from its parameters or from a constant."""
    return bool(compared_parameters(data, names) or open_edits(data, names, random.Random(0), 1.0))


def _changed_tests(data: bytes, names: set[Name], dice: random.Random, odds: float) -> bytes:
    """A test file with other expectations."""
    edits = open_edits(data, names, dice, odds)
    written = {name for name in sorted(names) if open_edits(data, {name}, dice, 1.0)}
    certain = wrong_tests(data, names - written, dice)
    return apply_all(data, [*edits, *(edit for edit in certain.values() if dice.random() < odds)])


def _changed_values(rows: ParameterValues, dice: random.Random, odds: float) -> ParameterValues:
    """Each value with probability `odds` another one of its kind."""
    return [
        [
            {name: other_value(text, dice) if dice.random() < odds else text for name, text in values.items()}
            for values in of_mark
        ]
        for of_mark in rows
    ]


def _by_function(run: GradingRun) -> dict[str, Sequence[tuple[str, Mapping[str, str]]]]:
    tests: dict[str, list[tuple[str, Mapping[str, str]]]] = defaultdict(list)
    for test, digests in run.ran.collected:
        tests[without_parameters(test)].append((test, digests))
    return dict(tests)
