"""Runs pytest on code that may try to forge its results: started as a script, job on stdin.

The code under test is imported by the process of its tests, so nothing in here is out of its reach. What stands
between it and a forged result:

- It comes last. pytest, and all that this file needs, are imported before a folder of the repository is on the path.
- Only signed lines count. The key comes in over stdin, which is closed then; stdout, exit status, files and reports
  that the code writes are nothing to the grader. A test without its own line has not passed.
- Canaries: tests that must fail, put in among the real ones under names that look like theirs. What makes failing
  tests pass (a patched pytest, an assertion that never raises) makes them pass too, and gives itself away.
- Expected values may be others than the task's (`Parameters`), and data files are taken away once tests are collected.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.util
import json
import os
import random
import re
import signal
import string
import sys
import time
from typing import Any, Callable, Iterator  # noqa: UP035 - as Python 3.7 has them

import pytest

CANARIES = 3
SUFFIXES = ("again", "twice", "empty", "nested", "large", "unicode", "default", "order", "copy", "types")
FAILING = ("assert {0} == {1}", "assert not {1}", "raise AssertionError({0})", "raise ValueError({1})")
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
    code = pytest.main(chosen, plugins=[Parameters(job.pop("parameters")), Witness(sign, job)])
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


class Witness:
    """A plugin that says of each test how it ended."""

    def __init__(self, sign: Sign, job: dict[str, Any]) -> None:
        self.sign = sign
        self.test_timeout_s: float = job["test_timeout_s"]
        self.needed = set(job["needed"])
        self.hidden: list[str] = job["hidden"]
        self.observe: bool = job["observe"]
        self.phases: dict[str, dict[str, Any]] = {}
        self.marked: set[str] = set()
        self.started: dict[str, float] = {}
        self.running: Any = None

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

    def _too_long(self, number: int, frame: Any) -> None:
        """Where a test hangs that must pass, no later one can change the verdict: the run ends behind it."""
        item = self.running
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
    """Changes expected values of ``parametrize`` before pytest makes ids and calls of them."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.names: dict[str, list[str]] = job["names"]
        self.odds: float = job["odds"]
        self.seed: int = job["seed"]

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: Any) -> None:
        wanted = self.names.get(metafunc.definition.nodeid, ())
        dice = random.Random(f"{self.seed} {metafunc.definition.nodeid}")
        for mark in metafunc.definition.iter_markers("parametrize") if wanted else ():
            if len(mark.args) >= 2:
                change_rows(mark, wanted, dice, self.odds)


def change_rows(mark: Any, wanted: Any, dice: random.Random, odds: float) -> None:
    """In the very list where there is one, so that nothing in the process shows other values than the tests get."""
    names = mark.args[0]
    names = [one.strip() for one in names.split(",") if one.strip()] if isinstance(names, str) else list(names)
    rows = mark.args[1] if isinstance(mark.args[1], list) else list(mark.args[1])
    columns = [at for at, name in enumerate(names) if name in wanted]
    for at, row in enumerate(rows):
        if columns and dice.random() < odds:
            rows[at] = changed_row(row, columns, len(names), dice)
    if rows is not mark.args[1]:
        object.__setattr__(mark, "args", (mark.args[0], rows, *mark.args[2:]))


def changed_row(row: Any, columns: list[int], count: int, dice: random.Random) -> Any:
    if hasattr(row, "_replace") and hasattr(row, "values") and hasattr(row, "marks"):  # pytest.param(...)
        return row._replace(values=changed_row(tuple(row.values), columns, 2, dice))
    if count == 1:
        return other_value(row, dice)
    if not isinstance(row, (list, tuple)):
        return row
    values = [other_value(value, dice) if at in columns else value for at, value in enumerate(row)]
    return values if isinstance(row, list) else tuple(values)


def other_value(value: Any, dice: random.Random) -> Any:
    """Returns a value of the same type that is unequal; the value itself if no such value is certain."""
    if type(value) in (str, bytes):
        return other_text(value, dice)
    if type(value) in (bool, int, float):
        return not value if type(value) is bool else value + dice.randint(1, 9)
    if type(value) in (list, tuple) and value:
        at = dice.randrange(len(value))
        return type(value)([*value[:at], other_value(value[at], dice), *value[at + 1 :]])
    if type(value) is dict and value:
        key = dice.choice(list(value))
        return {**value, key: other_value(value[key], dice)}
    return [dice.randint(1, 9)] if type(value) is list else value


def other_text(value: Any, dice: random.Random) -> Any:
    """One letter or digit is another one; a letter more where there is none."""
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    places = [at for at, sign in enumerate(text) if sign.isalnum()]
    at = dice.choice(places) if places else len(text)
    old = text[at : at + 1]
    letters = string.ascii_uppercase if old.isupper() else string.ascii_lowercase
    signs = "123456789" if old.isdigit() else letters
    text = text[:at] + dice.choice([sign for sign in signs if sign != old]) + text[at + 1 :]
    return text.encode("latin-1") if isinstance(value, bytes) else text


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
        free = [name for name in (f"{base}_{suffix}" for suffix in SUFFIXES) if name not in names]
        if free:
            name = dice.choice(free)
            names.add(name)
            yield pytest.Function.from_parent(module, name=name, callobj=failing(name, module, dice))


def places_in(items: list[Any], module: Any) -> list[int]:
    """Where a test of this module may be put in: never between two tests of a class, which may share what it set up."""
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
    line = dice.choice(FAILING).format(dice.randint(1, 99), dice.randint(100, 999))
    code = compile(f"def {name}():\n    {line}\n", str(getattr(module, "path", None) or module.fspath), "exec")
    space: dict[str, Any] = {}
    exec(code, space)  # noqa: S102 - our own text
    return space[name]


if __name__ == "__main__":
    main()
