"""Tasks from a working package: functions are broken one at a time, and breaks that no test notices are dropped.

package ──► tests that pass, twice ──► mutants in seeded order ──► run in a box ──► killed? ──► task ──► proven ──► row
                                                                       └─ no: thrown away      └─ no: thrown away
"""

from __future__ import annotations

import ast
import hashlib
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.common import gather_or_cancel
from penstock.datasets.swe.mutators import Mutation, mutations
from penstock.datasets.swe.package import Package, PackageError
from penstock.datasets.swe.rows import Fields
from penstock.datasets.swe.store import TreeStore
from penstock.sandbox import Sandbox
from penstock.sandbox.swe import (
    Grade,
    Name,
    Source,
    SweEnvironment,
    SweLimits,
    SweTask,
    check_task,
    first_line,
    function_of,
    functions,
    grade,
)


def without_tests(data: bytes, names: Collection[Name]) -> bytes | None:
    """The file without these functions; None where one of them is not written in it as a function, or it does not
    parse."""
    try:
        source = Source(data)
    except ValueError:
        return None
    removed = {name: function for name, function in functions(source.tree) if name in names}
    if set(removed) != set(names):
        return None
    gone = {id(function) for name, function in functions(source.tree) if name in names}
    lines = data.decode().split("\n")
    for body in _bodies(source.tree):
        _blank(lines, body, gone)
    rest: list[str] = []
    for line in lines:
        if line != _GONE and (line.strip() or rest[-2:] != ["", ""]):  # at most two empty lines in a row
            rest.append(line)
    return ("\n".join(rest).rstrip("\n") + "\n").encode()


_GONE = "\0"


def _bodies(tree: ast.Module) -> list[list[ast.stmt]]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.If | ast.Try)]
    return [body for node in nodes for body in (node.body, getattr(node, "orelse", [])) if body]


def _blank(lines: list[str], body: list[ast.stmt], gone: set[int]) -> None:
    """A body that loses all it has, keeps a ``pass``."""
    taken = [statement for statement in body if id(statement) in gone]
    for statement in taken:
        first, last = first_line(statement), statement.end_lineno or statement.lineno
        lines[first - 1 : last] = [_GONE] * (last - first + 1)
    if taken and len(taken) == len(body) and taken[0].col_offset:
        lines[first_line(taken[0]) - 1] = " " * taken[0].col_offset + "pass"


def problem_statement(package: str, killed: Sequence[str], output: str) -> str:
    """Return names and messages of the last failing tests, from pytest's summary at the end of `output`.

    The file, the function and the change are not named.
    """
    messages = dict(re.findall(r"^FAILED (\S+)(?: - (.*))?$", output, re.MULTILINE))
    named, lines = list(killed)[-3:], []
    for test in named:
        message = re.sub(r"0x[0-9a-fA-F]{4,}", "0x…", messages.get(test, "").strip())  # addresses differ by run
        lines.append(f"- {test.rpartition('::')[2]}" + (f": `{message}`" if message else ""))
    more = len(killed) - len(named)
    others = [f"- and {more} more"] if more else []
    return "\n".join(
        [f"A recent change broke `{package}`: tests that passed before it fail now.", "", *lines, *others, ""]
    )


TEST_COMMAND = "python3 -m pytest"
Report = Callable[[str], None]


@dataclass(frozen=True)
class FactorySettings:
    count: int = 20
    """Tasks wanted of this package."""
    seed: int = 0
    per_function: int = 3
    """At most this many of one function: else the longest one has most of the tasks."""
    max_share: float = 0.5
    """A mutant that breaks a larger share of the tests is not a useful exercise."""
    concurrency: int = 2
    """Boxes at once."""
    limits: SweLimits = field(default_factory=lambda: SweLimits(test_timeout_s=20.0, tests_timeout_s=300.0))


@dataclass(frozen=True)
class PackageTasks:
    """The tasks made of one package."""

    tasks: list[Fields]
    counts: Counter[str]
    """Counts of mutants: tried, killed, survived, unclear, too_much, unsound."""


class Factory:
    """Makes tasks of one package. Relative paths of rows are relative to `out`."""

    def __init__(self, package: Package, sandbox: Sandbox, out: Path, settings: FactorySettings) -> None:
        self._package = package
        self._sandbox = sandbox
        self._out = out
        self._settings = settings
        self._quick = settings.limits.model_copy(update={"decoys": 0, "after_a_hang": True})
        self._store = TreeStore(out / "repositories" / f"{package.name}.git")
        self._counts: Counter[str] = Counter()
        self._committed: set[str] = set()
        """Names of snapshots; those that became no task are forgotten again."""

    async def make(self, report: Report = lambda text: None) -> PackageTasks:
        """Raises `PackageError`, and what `grade` raises."""
        with tempfile.TemporaryDirectory() as folder:
            mutants = TreeStore(Path(folder) / "mutants.git")
            probe = await self._probe(mutants)
            report(f"{self._package.name}: {len(probe.fail_to_pass)} tests pass")
            files = self._package.files
            candidates = [one for path in self._package.sources for one in mutations(path, files[path])]
            random.Random(f"{self._settings.seed} {self._package.name}").shuffle(candidates)
            tasks = await self._take(candidates, probe, mutants, report)
        for name in self._committed - {str(task["instance_id"]) for task in tasks}:
            self._store.forget(name)
        self._store.pack()
        return PackageTasks(tasks, self._counts)

    # tests ---------------------------------------------------------------------------------------------------------
    async def _probe(self, mutants: TreeStore) -> SweTask:
        """The package as it is, as a task whose tests are all those that pass, twice."""
        base = mutants.commit("base", self._package.files)
        probe = self._task(self._package.name, mutants.folder, base, ("none",))
        # What a failing test says stands in one line of pytest's summary, as long as the line is.
        wide = f"COLUMNS=160 {probe.test_command}"
        probe = replace(probe, test_command=wide, fail_to_pass=await self._collect(probe))
        runs = [await grade(self._sandbox, probe, b"", self._quick) for _ in range(2)]
        if reason := next((run.doubt for run in runs if run.doubt), ""):
            raise PackageError(f"package {self._package.name}: its tests do not run: {reason}\n{runs[0].output}")
        passing = tuple(test for test in probe.fail_to_pass if all(run.outcomes[test] == "passed" for run in runs))
        if not passing:
            raise PackageError(f"package {self._package.name}: none of its tests passes in a box:\n{runs[0].output}")
        # A mutant that hangs must not take the whole of the limits: five times what the tests take is enough.
        spent_s = max(sum(run.seconds.values()) for run in runs)
        self._quick = self._quick.model_copy(
            update={"tests_timeout_s": min(10 + 5 * spent_s, self._quick.tests_timeout_s)}
        )
        return replace(probe, fail_to_pass=passing)

    async def _collect(self, probe: SweTask) -> tuple[str, ...]:
        environment = await SweEnvironment.open(self._sandbox, probe, self._quick)
        try:
            command = f"{probe.test_command} --collect-only -q --color=no -p no:cacheprovider -o addopts="
            listed = await environment.run(command, self._quick.tests_timeout_s)
        finally:
            await environment.close()
        tests = tuple(re.findall(r"^\S.*\.py::.+$", listed.stdout, re.MULTILINE))
        if not tests:
            output = (listed.stdout + listed.stderr)[-2000:]
            raise PackageError(f"package {self._package.name}: pytest finds no tests in a box:\n{output}")
        return tests

    # mutants -------------------------------------------------------------------------------------------------------
    async def _take(
        self, candidates: Sequence[Mutation], probe: SweTask, mutants: TreeStore, report: Report
    ) -> list[Fields]:
        """The first sound ones.

        Those of a wave run side by side and are taken in their order: which tasks come of a seed hangs neither on which
        box was the faster one, nor on how many there are.
        """
        tasks: list[Fields] = []
        per_function: Counter[tuple[str, str]] = Counter()
        waiting = list(candidates)
        while waiting and len(tasks) < self._settings.count:
            waiting = [one for one in waiting if per_function[_function_of(one)] < self._settings.per_function]
            wave, waiting = waiting[: self._settings.concurrency], waiting[self._settings.concurrency :]
            results = await gather_or_cancel([self._try(mutation, probe, mutants) for mutation in wave])
            for mutation, task in zip(wave, results, strict=True):
                free = per_function[_function_of(mutation)] < self._settings.per_function
                if task is not None and free and len(tasks) < self._settings.count:
                    tasks.append(task)
                    per_function[_function_of(mutation)] += 1
                    report(f"{self._package.name}: {len(tasks)} of {self._settings.count} tasks")
        return tasks

    async def _try(self, mutation: Mutation, probe: SweTask, mutants: TreeStore) -> Fields | None:
        """The task, where the mutant makes one."""
        broken = {**self._package.files, mutation.path: mutation.edit.apply(self._package.files[mutation.path])}
        name = _name_of(mutation)
        patch = mutants.diff(probe.base_commit or "", mutants.commit(name, broken))
        result = await grade(self._sandbox, replace(probe, instance_id=name), patch, self._quick)
        verdict = self._verdict(probe, result)
        self._counts.update(["tried", verdict])
        if verdict != "killed":
            return None
        fields = self._build(mutation, broken, probe, result)
        proof = await check_task(self._sandbox, SweTask.from_row(fields, self._out), self._settings.limits)
        if proof.problems:
            self._counts["unsound"] += 1
            return None
        return fields

    def _verdict(self, probe: SweTask, result: Grade) -> str:
        """A mutant that hangs, or keeps a file from being imported, says too little of what is wrong."""
        outcomes = [result.outcomes[test] for test in probe.fail_to_pass]
        if result.doubt or set(outcomes) - {"passed", "failed"}:
            return "unclear"
        failed = outcomes.count("failed")
        if not failed:
            return "survived"
        return "killed" if failed <= self._settings.max_share * len(outcomes) else "too_much"

    # tasks ---------------------------------------------------------------------------------------------------------
    def _build(self, mutation: Mutation, broken: dict[str, bytes], probe: SweTask, result: Grade) -> Fields:
        """Four trees: the broken package without the tests that fail, with them, and repaired without them."""
        killed = [test for test in probe.fail_to_pass if result.outcomes[test] == "failed"]
        name = f"{self._package.name}__{_name_of(mutation)}"
        hidden = _without(broken, killed)
        base = self._store.commit(name, hidden)
        self._committed.add(name)
        with tempfile.TemporaryDirectory() as folder:
            scratch = TreeStore(Path(folder) / "scratch.git")
            snapshot = scratch.commit("snapshot", hidden)
            whole = scratch.commit("whole", _with(hidden, broken, killed))
            repaired = scratch.commit("repaired", {**hidden, mutation.path: self._package.files[mutation.path]})
            test_patch, patch = scratch.diff(snapshot, whole), scratch.diff(snapshot, repaired)
        task = self._task(name, self._store.folder, base, tuple(killed))
        return {
            "instance_id": name,
            "repo": f"{self._package.name} {self._package.version}".strip(),
            "licence": self._package.licence,
            "repository": str(self._store.folder.relative_to(self._out)),
            "packages": "packages",
            "base_commit": base,
            "problem_statement": problem_statement(self._package.name, killed, result.output),
            "FAIL_TO_PASS": killed,
            "PASS_TO_PASS": [test for test in probe.fail_to_pass if result.outcomes[test] == "passed"],
            "test_patch": test_patch.decode(),
            "patch": patch.decode(),
            "test_command": task.test_command,
            "mutation": mutation.kind,
        }

    def _task(self, name: str, repository: Path, commit: str, tests: tuple[str, ...]) -> SweTask:
        command = TEST_COMMAND
        if any(path.startswith("src/") and path.endswith("__init__.py") for path in self._package.files):
            command = f"PYTHONPATH=src:$PYTHONPATH {TEST_COMMAND}"
        return SweTask(
            name,
            tests,
            repository=repository.absolute(),
            base_commit=commit,
            packages=(self._out / "packages").absolute(),
            test_command=command,
        )


def _function_of(mutation: Mutation) -> tuple[str, str]:
    return mutation.path, mutation.function


def _name_of(mutation: Mutation) -> str:
    """Gives no hint about the place of the bug."""
    text = f"{mutation.path} {mutation.edit.start} {mutation.edit.end} {mutation.edit.text}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _without(files: dict[str, bytes], tests: Sequence[str]) -> dict[str, bytes]:
    """Without the functions of these tests; a file whose functions cannot be distinguished is removed whole."""
    remaining = dict(files)
    for path in dict.fromkeys(test.partition("::")[0] for test in tests):
        names = {function_of(test) for test in tests if test.startswith(f"{path}::")}
        rest = without_tests(files[path], names)
        if rest is None:
            del remaining[path]
        else:
            remaining[path] = rest
    return remaining


def _with(hidden: dict[str, bytes], files: dict[str, bytes], tests: Sequence[str]) -> dict[str, bytes]:
    paths = {test.partition("::")[0] for test in tests}
    return {**hidden, **{path: files[path] for path in paths}}
