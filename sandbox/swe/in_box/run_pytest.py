"""Runs pytest on code that may try to forge its results: started as a script, job on stdin.

The code under test is imported by the process of its tests, so nothing in here is out of its reach. What stands
between it and a forged result:

- It comes last. pytest, and all that this file needs, are imported before a folder of the repository is on the path.
- Only signed lines count. The key comes in over stdin, which is closed then; stdout, exit status, files and reports
  that the code writes are nothing to the grader. A test without its own line has not passed.
- Canaries: tests that must fail, put in among the real ones under names that look like theirs. What makes failing
  tests pass (a patched pytest, an assertion that never raises) makes them pass too, and gives itself away.
- Expected values may be others than the task's, and data files are taken away once tests are collected.
"""

from __future__ import annotations

import ast
import hashlib
import hmac
import importlib.util
import json
import os
import random
import re
import signal
import sys
import time
from typing import Any, Callable, Iterator  # noqa: UP035 - as Python 3.7 has them

import pytest

CANARIES = 3
Sign = Callable[[Any], None]
REAL = os._exit
"""Taken before other code could put something else in its place."""


def main() -> None:
    job = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sign = signer(bytes.fromhex(job.pop("key")), job.pop("results"))
    sign({"kind": "ready", "pytest": pytest.__version__})
    chosen = arguments(job)
    sys.path[:0] = [os.path.abspath(path) for path in job["paths"]]
    paths = [os.path.abspath(path) for path in job["paths"][1:]]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH", "")]))
    sys.argv = ["pytest", *job["arguments"]]
    code = pytest.main(
        chosen, plugins=[Parameters(sign, job.pop("parameters"), job["observed"]), OutcomeReporter(sign, job)]
    )
    sys.stdout.flush()
    sys.stderr.flush()
    REAL(int(code))  # without waiting for threads that the tests left


def arguments(job: dict[str, Any]) -> list[str]:
    """The command's own, then what must hold: no early end, one process, names relative to the repository."""
    files = [path for path in job["files"] if os.path.exists(path)]
    fixed = ["--maxfail=0", "--rootdir=" + os.getcwd(), "--color=no", "-p", "no:randomly"]
    if importlib.util.find_spec("xdist") is not None:
        fixed.append("-n0")
    return [*job["arguments"], *fixed, *files]


def signer(key: bytes, path: str) -> Sign:
    """Appends a line per record: its number, its signature, the record. The key is nowhere else."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o600)
    state = {"number": 0}
    write, new, digest, dumps = os.write, hmac.new, hashlib.sha256, json.dumps  # as they are now

    def sign(record: dict[str, Any]) -> None:
        text = dumps({**record, "number": state["number"]}, sort_keys=True).encode("ascii")
        state["number"] += 1
        write(file, new(key, text, digest).hexdigest().encode("ascii") + b" " + text + b"\n")

    return sign


class OutcomeReporter:
    """A plugin that says of each test how it ended."""

    def __init__(self, sign: Sign, job: dict[str, Any]) -> None:
        self.sign = sign
        self.test_timeout_s: float = job["test_timeout_s"]
        self.needed = set(job["needed"])
        self.hidden: list[str] = job["hidden"]
        self.observe: bool = job["observed"] is not None
        self.phases: dict[str, dict[str, Any]] = {}
        self.marked: set[str] = set()
        self.started: dict[str, float] = {}
        self.running: Any = None
        self.inside = False
        """True in a phase of a test, whose exceptions are its own."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        self.marked = {item.nodeid for item in items if item.get_closest_marker("xfail")}
        if self.observe:
            self.sign({"kind": "collected", "tests": [[item.nodeid, digests(item)] for item in items]})
        canaries = list(make_canaries(items))
        self.sign({"kind": "canaries", "tests": [canary.nodeid for canary in canaries]})
        for canary in canaries:
            items.insert(random.SystemRandom().choice(places_in(items, canary.parent)), canary)
        for path in self.hidden:
            if os.path.exists(path):
                os.unlink(path)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        self.started[item.nodeid] = time.monotonic()
        self.running = item
        signal.signal(signal.SIGALRM, self._too_long)
        signal.setitimer(signal.ITIMER_REAL, self.test_timeout_s, self.test_timeout_s)
        yield
        signal.setitimer(signal.ITIMER_REAL, 0)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup

    def _too_long(self, number: int, frame: Any) -> None:
        """End the run behind a test that hangs and must pass: no later one can change the verdict."""
        item = self.running
        if not self.inside:  # raised between two phases it would end pytest; the timer comes again
            return
        if item.nodeid in self.needed:
            item.session.shouldstop = "a test hangs"
            self.needed.discard(item.nodeid)
            self.sign({"kind": "stopped", "test": item.nodeid})
        raise pytest.fail.Exception(f"the test ran longer than {self.test_timeout_s:g} s")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome != "rerun":
            self.phases.setdefault(report.nodeid, {})[report.when] = (report.outcome, hasattr(report, "wasxfail"))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcome = self._outcome(nodeid, self.phases.pop(nodeid, {}))
        seconds = round(time.monotonic() - self.started.pop(nodeid, time.monotonic()), 3)
        self.sign({"kind": "test", "test": nodeid, "outcome": outcome, "seconds": seconds})

    def _outcome(self, nodeid: str, phases: dict[str, Any]) -> str:
        """``passed`` also where a test that its author marked as expected to fail did fail."""
        outcomes = {when: outcome for when, (outcome, _) in phases.items()}
        if outcomes == {"setup": "passed", "call": "passed", "teardown": "passed"}:
            return "passed"
        if "failed" in outcomes.values() or not outcomes:
            return "failed"
        expected = any(xfailed for _, xfailed in phases.values()) and nodeid in self.marked
        return "passed" if expected else "skipped"

    def pytest_sessionfinish(self) -> None:
        self.sign({"kind": "end"})


class Parameters:
    """Expected values of ``parametrize``, put in before pytest makes ids and calls of them.

    Every box gets them, so that neither this object nor the lists of the tests show whether they are the task's own.
    """

    def __init__(self, sign: Sign, values: dict[str, Any], observed: Any) -> None:
        self.sign = sign
        self.values = values
        self.observed: dict[str, list[str]] = observed or {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: Any) -> None:
        test = metafunc.definition.nodeid
        if test not in self.observed and test not in self.values:
            return
        marks = [mark for mark in metafunc.definition.iter_markers("parametrize") if len(mark.args) >= 2]
        if test in self.observed:
            values = [read_rows(mark, self.observed[test]) for mark in marks]
            self.sign({"kind": "parameters", "test": test, "values": values})
        for mark, rows in zip(marks, self.values.get(test, ())):  # noqa: B905 - not before Python 3.10
            put_rows(mark, rows)


def names_of(mark: Any) -> list[str]:
    names = mark.args[0]
    return [one.strip() for one in names.split(",") if one.strip()] if isinstance(names, str) else list(names)


def read_rows(mark: Any, columns: list[str]) -> list[dict[str, str]]:
    """The wanted values of each row, of those that have a literal."""
    names = names_of(mark)
    rows = []
    if not isinstance(mark.args[1], list):  # once, if it can be read only once
        object.__setattr__(mark, "args", (mark.args[0], list(mark.args[1]), *mark.args[2:]))
    for row in mark.args[1]:
        values = dict(zip(names, cells_of(row, len(names)) or []))  # noqa: B905 - not before Python 3.10
        rows.append({name: repr(values[name]) for name in columns if name in values and has_literal(values[name])})
    return rows


def put_rows(mark: Any, values: list[dict[str, str]]) -> None:
    """Put rows in the existing list if there is one, so that nothing in the process shows other values than the tests
    get.
    """
    names = names_of(mark)
    rows = mark.args[1] if isinstance(mark.args[1], list) else list(mark.args[1])
    for at, texts in enumerate(values[: len(rows)]):
        cells = cells_of(rows[at], len(names))
        if texts and cells is not None:
            new = [ast.literal_eval(texts[name]) if name in texts else cell for name, cell in zip(names, cells)]  # noqa: B905
            rows[at] = row_like(rows[at], new)
    if rows is not mark.args[1]:
        object.__setattr__(mark, "args", (mark.args[0], rows, *mark.args[2:]))


def cells_of(row: Any, count: int) -> Any:
    """None for a row without `count` values."""
    if hasattr(row, "_replace") and hasattr(row, "values") and hasattr(row, "marks"):  # pytest.param(...)
        return list(row.values)
    if count == 1:
        return [row]
    return list(row) if isinstance(row, (list, tuple)) else None


def row_like(row: Any, cells: list[Any]) -> Any:
    if hasattr(row, "_replace") and hasattr(row, "values") and hasattr(row, "marks"):
        return row._replace(values=tuple(cells))
    if len(cells) == 1:
        return cells[0]
    return cells if isinstance(row, list) else tuple(cells)


def has_literal(value: Any) -> bool:
    try:
        return type(ast.literal_eval(repr(value))) is type(value)
    except (ValueError, SyntaxError):
        return False


def digests(item: Any) -> dict[str, str]:
    """Digests a test's parameters, so that two runs can be compared. Addresses of objects are left out."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    texts = {name: re.sub(" at 0x[0-9a-f]+", "", repr(value)) for name, value in parameters.items()}
    return {name: hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16] for name, text in texts.items()}


def make_canaries(items: list[Any]) -> Iterator[Any]:
    """Up to `CANARIES` failing tests, in modules whose tests would not be skipped as a whole."""
    dice = random.SystemRandom()
    hosts = [item for item in items if isinstance(item, pytest.Function) and is_plain(item.getparent(pytest.Module))]
    names = {item.name for item in items}
    for host in dice.sample(hosts, min(CANARIES, len(hosts))):
        module = host.getparent(pytest.Module)
        base = getattr(host, "originalname", None) or host.name.partition("[")[0]
        suffixes = ("again", "twice", "empty", "nested", "large", "unicode", "default", "order", "copy", "types")
        free = [name for name in (f"{base}_{suffix}" for suffix in suffixes) if name not in names]
        if free:
            name = dice.choice(free)
            names.add(name)
            yield pytest.Function.from_parent(module, name=name, callobj=failing(name, module, dice))


def places_in(items: list[Any], module: Any) -> list[int]:
    """Return the places for a further test of this module: never between two tests of a class, which may share its
    set-up.
    """
    pairs = zip(items, [*items[1:], None])  # noqa: B905 - not before Python 3.10
    return [
        index + 1
        for index, (item, after) in enumerate(pairs)
        if item.getparent(pytest.Module) is module
        and (item.parent is module or after is None or after.parent is not item.parent)
    ]


def is_plain(module: Any) -> bool:
    """A canary would be skipped with a module that is marked as a whole."""
    return module is not None and not any(module.get_closest_marker(mark) for mark in ("skip", "skipif", "xfail"))


def failing(name: str, module: Any, dice: random.Random) -> Any:
    """A function that fails, said to come from the module's own file."""
    failing = ("assert {0} == {1}", "assert not {1}", "raise AssertionError({0})", "raise ValueError({1})")
    line = dice.choice(failing).format(dice.randint(1, 99), dice.randint(100, 999))
    code = compile(f"def {name}():\n    {line}\n", str(getattr(module, "path", None) or module.fspath), "exec")
    space: dict[str, Any] = {}
    exec(code, space)  # noqa: S102 - our own text
    return space[name]


if __name__ == "__main__":
    main()
