"""The measured tests: their seconds, what each executes, and which to run for a point, in which order."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import coverage
import pytest

from mutation.points import Point, function_lines
from mutation.runs import Recorder, fork, read_notes, run_pytest
from mutation.tree import mirrored_folder, script_names


def measure(copy: Path, work: Path, files: Iterable[str], tests: Sequence[str], marker: str) -> dict[str, Any]:
    """Run the tests once under coverage; the result is JSON, for `Suite` and `preload`."""
    notes, result = work / "measured.notes", work / "measured.json"
    python = [file for file in files if file.endswith(".py")]

    def action() -> int:
        cover = coverage.Coverage(data_file=None, config_file=False, include=[str(copy / file) for file in python])
        recorder = Recorder(notes, on_start=cover.switch_context)
        cover.start()
        code = run_pytest(tests, recorder, "-m", marker, "--continue-on-collection-errors")
        cover.stop()
        lines = {file: cover.get_data().contexts_by_lineno(str(copy / file)) for file in python}
        found = {"modules": recorder.modules, "environ": recorder.environ, "fixtures": recorder.seconds, "lines": lines}
        result.write_text(json.dumps(found))
        return code

    _, status = os.waitpid(fork(copy, 2, action), 0)
    if os.waitstatus_to_exitcode(status) not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit("mutate: the tests cannot be measured; their output is above")
    measured: dict[str, Any] = json.loads(result.read_text())
    entries = read_notes(notes)
    not_passed = {entry[key] for entry in entries for key in ("failed", "skipped") if key in entry}
    tests, users = list[Any](), dict[str, list[int]]()
    for number, entry in enumerate(entry for entry in entries if "end" in entry):
        shared = [name for name in (f"fixture:{name}" for name in entry["fixtures"]) if name in measured["fixtures"]]
        tests.append([entry["end"], entry["seconds"], entry["end"] not in not_passed, shared])
        for name in (entry["end"], *shared):
            users.setdefault(name, []).append(number)
    for file, lines in measured["lines"].items():
        called = function_lines((copy / file).read_bytes())
        numbers = {
            line: sorted({number for name in by for number in users.get(name, ())}) for line, by in lines.items()
        }
        measured["lines"][file] = {line: by for line, by in numbers.items() if by and int(line) in called}
    return measured | {"tests": tests}


class Suite:
    def __init__(self, root: Path, measured: dict[str, Any]) -> None:
        self._root = root
        self.failing: set[str] = {test for test, _, passes, _ in measured["tests"] if not passes}
        """Without any mistake: skipped, failed when measured, or failed alone."""
        self._seconds: dict[str, float] = measured["fixtures"] | {test: own for test, own, _, _ in measured["tests"]}
        self._fixtures: dict[str, list[str]] = {test: shared for test, _, _, shared in measured["tests"]}
        names = list(self._fixtures)
        self._lines: dict[str, dict[int, set[str]]] = {
            file: {int(line): {names[test] for test in by} for line, by in lines.items()}
            for file, lines in measured["lines"].items()
        }

    def seconds(self, tests: Iterable[str]) -> float:
        """Of all of them together, with each shared fixture once."""
        tests = set(tests)
        return sum(self._seconds[name] for name in tests.union(*(self._fixtures[test] for test in tests)))

    def candidates(self, point: Point) -> list[str] | None:
        """Tests to run, best first; None where tests execute the line, but none of them passes without the mistake."""
        touching = self._executing(point.path, self._lines.get(point.path, {}))
        near = touching  # what the import executes, each test of the file may notice
        if point.path.endswith(".lua"):
            near = self._executing_names_of(point)
        elif point.in_function:
            near = self._executing(point.path, range(point.lines[0], max(point.lines[1], point.line) + 1))
        if near and near <= self.failing:
            return None
        folder = mirrored_folder(self._root, point.path) + "/"
        far = touching if near else touching | {test for test in self._fixtures if test.startswith(folder)}
        return self._ranked(near, point, folder) + self._ranked(far - near, point, folder)

    def _ranked(self, tests: set[str], point: Point, folder: str) -> list[str]:
        stem = f"test_{Path(point.path).stem}"

        def cost(test: str) -> tuple[float, str]:
            weight = 1 if stem in test else 2 if test.startswith(folder) else 4
            return weight * max(self.seconds([test]), 0.01), test

        return sorted(tests - self.failing, key=cost)

    def _executing(self, path: str, lines: Iterable[int]) -> set[str]:
        executed = self._lines.get(path, {})
        return set().union(*(executed.get(line, ()) for line in lines))

    def _executing_names_of(self, point: Point) -> set[str]:
        names, tests = script_names(self._root, point.path, point.line), set[str]()
        for path in self._lines:
            lines = (self._root / path).read_text().split("\n")
            tests |= self._executing(path, (number for number, line in enumerate(lines, 1) if names.search(line)))
        return tests

    def batches(self, tests: Sequence[str], first: int, budget_s: float) -> Iterator[list[str]]:
        """The `first` tests, then the others as far as `budget_s` of measured time goes; each batch sorted by file."""
        kept: list[str] = []
        known: set[str] = set()
        total = 0.0
        for test in tests:
            names = {test, *self._fixtures[test]} - known
            seconds = sum(self._seconds[name] for name in names)
            if not kept or total + seconds <= budget_s:
                total, known = total + seconds, known | names
                kept.append(test)
        for batch in filter(None, (kept[:first], kept[first:])):
            places = {test.partition("::")[0]: place for place, test in reversed([*enumerate(batch)])}
            yield sorted(batch, key=lambda test, places=places: places[test.partition("::")[0]])  # type: ignore[misc]
