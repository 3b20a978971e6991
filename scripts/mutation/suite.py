"""The measured tests: their seconds, what each executes, and which to run for a point, in which order."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import coverage
import pytest
from coverage.exceptions import DataError

from mutation.points import Point, function_lines
from mutation.runs import Recorder, fork, read_notes, run_pytest
from mutation.tree import mirrored_folder, script_names


def measure(
    copies: Sequence[Path], work: Path, files: Iterable[str], tests: Sequence[str], marker: str
) -> dict[str, Any]:
    """Run the tests once under coverage, each copy in a process of its own that takes the next file of tests.

    The result is JSON, for `Suite` and `preload`.
    """
    python = [file for file in files if file.endswith(".py")]
    notes = [work / f"{copy.name}.notes" for copy in copies]
    claims = work / "claims"
    claims.mkdir()

    def action(copy: Path, own_notes: Path) -> int:
        include = [str(copy / file) for file in python]
        children = Children(own_notes.with_suffix(".children"), include)
        cover = coverage.Coverage(data_file=None, config_file=False, include=include)

        def on_start(name: str) -> None:
            cover.switch_context(name)
            children.begin(name)

        recorder = Recorder(own_notes, on_start=on_start, claims=claims)
        cover.start()
        code = run_pytest(tests, recorder, "-m", marker, "--continue-on-collection-errors")
        cover.stop()
        lines = {file: cover.get_data().contexts_by_lineno(str(copy / file)) for file in python}
        children.add_to(lines, copy)
        found = {"modules": recorder.modules, "environ": recorder.environ, "fixtures": recorder.seconds, "lines": lines}
        own_notes.with_suffix(".json").write_text(json.dumps(found))
        return code

    pids = [fork(copy, 2, partial(action, copy, own_notes)) for copy, own_notes in zip(copies, notes, strict=True)]
    codes = {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids}
    if not codes <= {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED}:
        raise SystemExit("mutate: the tests cannot be measured; their output is above")
    entries = [entry for own_notes in notes for entry in read_notes(own_notes)]
    found = [json.loads(own_notes.with_suffix(".json").read_text()) for own_notes in notes]
    return _merged(copies[0], entries, found)


class Children:
    """Measures the Python processes that tests start: each reads the configuration that is there when it starts.

    Those that are started without the environment of the tests, or are killed, are not seen.
    """

    def __init__(self, folder: Path, include: Sequence[str]) -> None:
        folder.mkdir()
        self._config, self._data, self._include = folder / "coveragerc", folder / "data", include
        self._names: list[str] = []
        self.begin("")
        os.environ["COVERAGE_PROCESS_START"] = str(self._config)

    def begin(self, name: str) -> None:
        """What starts from now on is a process of this test, or `fixture:NAME`."""
        settings = {"data_file": self._data, "parallel": True, "sigterm": True, "patch": "_exit, fork"}
        settings |= {"context": len(self._names), "include": ", ".join(self._include)}
        self._names.append(name)
        new = self._config.with_suffix(".new")
        new.write_text("[run]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()))
        new.replace(self._config)

    def add_to(self, lines: dict[str, dict[int, list[str]]], copy: Path) -> None:
        """`lines`: of each file in `copy`, the names by line."""
        for path in self._data.parent.glob(f"{self._data.name}.*"):
            part = coverage.CoverageData(str(path))
            with contextlib.suppress(DataError):  # of a process that was killed while it wrote
                part.read()
                for file, found in lines.items():
                    for line, numbers in part.contexts_by_lineno(str(copy / file)).items():
                        found.setdefault(line, []).extend(self._names[int(number)] for number in numbers if number)


def _merged(copy: Path, entries: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the processes found, as one; lines are given the numbers of the tests that execute them."""
    fixtures = {name: max(part["fixtures"].get(name, 0.0) for part in found) for name in _keys(found, "fixtures")}
    not_passed = {entry[key] for entry in entries for key in ("failed", "skipped") if key in entry}
    tests, users = list[Any](), dict[str, list[int]]()
    for number, entry in enumerate(entry for entry in entries if "end" in entry):
        shared = [name for name in (f"fixture:{name}" for name in entry["fixtures"]) if name in fixtures]
        tests.append([entry["end"], entry["seconds"], entry["end"] not in not_passed, shared])
        for name in (entry["end"], *shared):
            users.setdefault(name, []).append(number)
    lines = dict[str, dict[str, list[int]]]()
    for file in _keys(found, "lines"):
        called, numbers = function_lines((copy / file).read_bytes()), dict[str, set[int]]()
        for part in found:
            for line, names in part["lines"][file].items():
                numbers.setdefault(line, set()).update(*(users.get(name, ()) for name in names))
        lines[file] = {line: sorted(by) for line, by in numbers.items() if by and int(line) in called}
    first = found[0]
    return {
        "modules": first["modules"],
        "environ": first["environ"],
        "fixtures": fixtures,
        "lines": lines,
        "tests": tests,
    }


def _keys(found: Iterable[dict[str, Any]], key: str) -> list[str]:
    return list(dict.fromkeys(name for part in found for name in part[key]))


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
        folder = mirrored_folder(self._root, point.path) + "/"
        if point.path.endswith(".lua"):
            near = self._executing_names_of(point)
        elif point.in_function:
            near = self._executing(point.path, range(point.lines[0], max(point.lines[1], point.line) + 1))
        else:  # what the import executes, each test that imports it may notice
            near = touching | self._importing(point.path)
        if near and near <= self.failing:
            return None
        far = touching if near else touching | {test for test in self._fixtures if test.startswith(folder)}
        return self._ranked(near, point, folder) + self._ranked(far - near, point, folder)

    def _importing(self, path: str) -> set[str]:
        """Tests in files that import something of the file's topmost folder."""
        parts = Path(path).parts
        name = parts[2] if parts[0] == "src" else parts[0]
        imports = re.compile(rf"(?m)^\s*(?:from|import) .*\b{name}\b")
        files = {test.partition("::")[0] for test in self._fixtures}
        found = {file for file in files if imports.search((self._root / file).read_text())}
        return {test for test in self._fixtures if test.partition("::")[0] in found}

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
