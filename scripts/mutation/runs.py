"""Runs of pytest in processes forked from this one, and what they tell.

Forked, not started: pytest and the third-party modules of the tests, which take longer to import than most tests to
run, are there already. Product code is imported in the fork alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

MEMORY = 12 << 30  # bytes that one process may allocate: a mistake can make a loop endless


@dataclass(eq=False)  # pytest keeps its plugins in sets
class Recorder:
    """Pytest plugin: chooses and orders the tests; notes their starts, ends, failures and skips, one JSON a line.

    The set-up of a fixture that several tests share is noted for itself: its seconds are not those of the first test.
    """

    notes: Path
    chosen: Sequence[str] | None = None
    """None for all."""
    on_start: Callable[[str], object] = str
    """Called with the test, or with `fixture:NAME`, that runs from now on."""
    claims: Path | None = None
    """A folder that processes with the same tests share: each file of tests runs in the one that claims it there."""
    modules: list[str] = field(default_factory=list)
    """Third-party modules that are imported when all tests are collected."""
    environ: dict[str, str] = field(default_factory=dict)
    """The environment by then; some modules read it when they are imported."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of shared fixtures, `fixture:NAME`."""
    _running: list[str] = field(default_factory=list)

    def note(self, **entry: Any) -> None:
        with self.notes.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        files = {name: getattr(module, "__file__", None) or "" for name, module in [*sys.modules.items()]}
        self.modules = [name for name, file in files.items() if "site-packages" in file]
        self.environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYT", "COV"))}
        if self.chosen is not None:
            rank = {test: index for index, test in enumerate(self.chosen)}
            items[:] = sorted((item for item in items if item.nodeid in rank), key=lambda item: rank[item.nodeid])

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if self.claims is None:
            return None
        items = self._claimed(session.items, self.claims)
        item = next(items, None)
        while item is not None:
            following = next(items, None)  # what a test leaves open depends on the test that follows it
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        return True

    @staticmethod
    def _claimed(items: Iterable[pytest.Item], claims: Path) -> Iterator[pytest.Item]:
        for number, (_, group) in enumerate(itertools.groupby(items, key=lambda item: item.path)):
            with contextlib.suppress(FileExistsError):
                (claims / str(number)).touch(exist_ok=False)
                yield from group

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.note(start=item.nodeid)
        with self._timed(item.nodeid):
            result = yield
        self.note(end=item.nodeid, fixtures=getattr(item, "fixturenames", []), seconds=self.seconds.pop(item.nodeid))
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        with self._timed(f"fixture:{fixturedef.argname}"):
            return (yield)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Adds the time to `seconds[name]`, without that of others within."""
        self._running.append(name)
        self.on_start(name)
        began, others = time.monotonic(), sum(self.seconds.values())
        try:
            yield
        finally:
            others = sum(self.seconds.values()) - others
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - began - others, 3)
            self._running.pop()
            if self._running:
                self.on_start(self._running[-1])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self.note(**{report.outcome: report.nodeid})


@dataclass(frozen=True)
class Outcome:
    """How a run of chosen tests ended."""

    cause: str
    """failed, crashed or hung; empty where nothing was noticed."""
    by: str
    """The test that failed or was running; empty where there was none, as when a module cannot be imported."""
    passed: list[str]

    @property
    def names_no_test(self) -> bool:
        """Something went wrong before or beside the tests: their modules, a conftest.py, pytest itself."""
        return bool(self.cause) and not self.by


def read_notes(notes: Path) -> list[dict[str, Any]]:
    lines = notes.read_text().splitlines() if notes.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def outcome_of(notes: Path, code: int | None) -> Outcome:
    """`code` is None where the process was killed at its deadline."""
    entries = read_notes(notes)
    started, ended, failed = ([entry[key] for entry in entries if key in entry] for key in ("start", "end", "failed"))
    running = [test for test in started if test not in ended]
    finished = code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    cause = "hung" if code is None else "crashed" if not finished else "failed" if failed or code == 1 else ""
    return Outcome(cause, [*failed, *running, ""][0], [test for test in ended if test not in failed])


def run_pytest(paths: Iterable[str], recorder: Recorder, *options: str) -> int:
    seed = ["--hypothesis-seed=0"] if importlib.util.find_spec("hypothesis") else []
    return int(pytest.main([*paths, "-q", "-p", "no:cacheprovider", *seed, *options], plugins=[recorder]))


def run_chosen(tests: Sequence[str], notes: Path, *options: str) -> int:
    """Run these tests, in this order."""
    # Files sorted: in some other orders pytest misses a folder's fixtures. The recorder puts the tests into theirs.
    return run_pytest(sorted({test.partition("::")[0] for test in tests}), Recorder(notes, tests), *options)


def run_check(command: str) -> int:
    return subprocess.run(shlex.split(command), check=False).returncode


def preload(modules: Iterable[str], environ: dict[str, str]) -> None:
    """Import here what every fork would import."""
    os.environ.update(environ)
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def fork(copy: Path, output: int, action: Callable[[], int]) -> int:
    """Run `action` in `copy` in a process group of its own; returns its process id. `output` is a file descriptor."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 70
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        os.chdir(copy)
        for target, source in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
            os.dup2(source, target)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        paths = [str(copy / "src"), str(copy)]
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
        # Bytecode is known by second and size: that of one mutant would be taken for the next one's.
        os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "1", True
        sys.path[:0], sys.argv = paths, ["pytest"]
        code = action()
    finally:
        os._exit(code)


def reap(pid: int, *, kill: bool) -> tuple[bool, int | None]:
    """Whether the process has ended, and its exit code, None if it was killed here. Ends what it leaves behind too."""
    if kill:
        _end_group(pid)
    ended, status = os.waitpid(pid, 0 if kill else os.WNOHANG)
    if ended and not kill:
        _end_group(pid)
    return bool(ended), None if kill else os.waitstatus_to_exitcode(status)


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
