"""`scripts/mutate`: every kind of mistake, the draw, and whole runs on a small package of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from mutation.__main__ import in_words, make_report
from mutation.campaign import State
from mutation.points import points_of
from mutation.runs import outcome_of
from mutation.tree import script_names

PYTHON = [  # one line of a function's body, or of several; the operator; the line with the mistake
    ("if a < b: return", "compare", "if a <= b: return"),
    ("if (a) is not (b): return", "compare", "if (a) is (b): return"),
    ("x = a in b", "compare", "x = a not in b"),
    ("x = a + b", "arithmetic", "x = a - b"),
    ("x += a", "arithmetic", "x -= a"),
    ("x = a // b", "arithmetic", "x = a * b"),
    ("x = a and b or c", "logic", "x = a or b or c"),
    ("while a: pass", "negate condition", "while not (a): pass"),
    ("x = [a for a in b if a]", "negate condition", "x = [a for a in b if not (a)]"),
    ("x = not a", "drop not", "x = a"),
    ("x = 7", "constant", "x = 8"),
    ("x, y_s = 7, 9", "constant", "x, y_s = 8, 9"),
    ("x = é(0.5, 'é')", "constant", "x = é(1.5, 'é')"),
    ("x = True", "constant", "x = False"),
    ("return a", "return None", "return None"),
    ("await call(a)", "drop statement", "pass"),
    ("a.x = b", "drop statement", "pass"),
    ("a[b] += c", "drop statement", "pass"),
    ("raise ValueError(a + 1)", "drop raise", "pass"),
    ("for a in b: break", "break", "for a in b: continue"),
    ("x = min(a, b)", "min/max", "x = max(a, b)"),
    ("x = torch.maximum(a, b)", "min/max", "x = torch.minimum(a, b)"),
    ("x = a[b:c]", "slice", "x = a[b:(c) + 1]"),
]
LUA = [
    ("if a < b then return end", "compare", "if a <= b then return end"),
    ("if a == 'b == c' then return end", "compare", "if a ~= 'b == c' then return end"),
    ("local x = a - 1", "arithmetic", "local x = a + 1"),
    ("local x = ARGV[2]", "constant", "local x = ARGV[3]"),
    ("local x = a and b", "logic", "local x = a or b"),
    ("if not a then return end", "drop not", "if a then return end"),
    ("redis.call('DEL', key(a))", "drop statement", ""),
    ("if a then call('DEL', a) end", "drop statement", "if a then end"),
]
QUIET = [
    '"""A docstring with 1 < 2."""',
    "import a, b",
    "__all__ = ['a' * 2]",
    "Pair = tuple[int, 2]",
    "count: Literal[1]",
    "if TYPE_CHECKING:\n    a = 1 + 2",
    "if __name__ == '__main__':\n    main(1)",
    "def f(a: Annotated[int, 1]) -> Literal[2]: ...",
    "@overload\ndef f(a=1): ...",
    "@cache(1)\ndef f(a): ...",
    "log.warning('%s', a + 1)",
    "assert a == 1",
    "x = f'{a + 1}' + b",
    "raise ValueError(await a(1))",
    "timeout_s = 30.0",
    "deadline_s: float = 2",
    "FIRST_S, LONGEST_S = 0.05, 1.0",
    "def f(poll_s=2): ...",
    "x = g(timeout=3)",
    "x = zip(a, b, strict=True)",
]


def shown(path: str, source: str) -> set[tuple[str, str]]:
    return {(point.operator, point.show(source.encode())[1]) for point in points_of(path, source.encode())}


@pytest.mark.parametrize(
    ("path", "source", "operator", "after"),
    [("a.py", f"async def f():\n    {line}\n", *expected) for line, *expected in PYTHON]
    + [("a.lua", f"-- 1 < 2\n{line}\n", *expected) for line, *expected in LUA],
)
def test_operator(path: str, source: str, operator: str, after: str) -> None:
    assert (operator, after) in shown(path, source)


@pytest.mark.parametrize(
    ("path", "source"), [*(("a.py", source) for source in QUIET), ("a.lua", "local x = f(a,\n  g(b)\n  .. c)\n")]
)
def test_no_point_without_effect(path: str, source: str) -> None:
    assert shown(path, source) == set()


def test_multi_line_statement_is_replaced_whole() -> None:
    source = b"def f():\n    a.b(\n        c,\n    )\n    return d\n"
    (dropped,) = (point for point in points_of("a.py", source) if point.operator == "drop statement")
    assert dropped.plant(source) == b"def f():\n    pass\n    return d\n"
    assert (dropped.line, dropped.lines) == (2, (2, 4))


PYPROJECT = "[tool.pytest.ini_options]\npythonpath = ['src']\naddopts = ['--import-mode=importlib']\n"
TOY = {
    "src/toy/queue/limits.py": """
LIMIT = 3
def admits(count: int) -> bool:
    return count < LIMIT
def unasserted(count: int) -> int:
    return count
def failing() -> list[int]:
    return []
def untested() -> list[int]:
    return []
def total(count: int) -> int:
    added = 0
    for _ in range(count):
        added += 1
    return added
""",
    "src/toy/queue/fixtures.py": "def shared() -> list[int]:\n    return [1]\n",
    "src/toy/queue/elsewhere.py": "def in_a_child() -> str:\n    return 'started'\n",
    "src/toy/queue/lua/admit.lua": "-- count, limit\nreturn a < b\n",
    "src/toy/queue/scripts.py": """
from pathlib import Path
def load() -> str:
    name = "admit"
    return (Path(__file__).parent / "lua" / f"{name}.lua").read_text()
""",
    "tests/queue/test_limits.py": """
import pytest
from toy.queue.fixtures import shared
from toy.queue.limits import admits, failing, total, unasserted
from toy.queue.scripts import load
@pytest.fixture(scope="module")
def both():
    return shared()
def test_first_to_use_it(both):
    assert both
def test_shared(both):
    assert both == [1]
def test_admits():
    assert [admits(2), admits(3)] == [True, False]
def test_script():
    assert load().endswith("return a < b\\n")
def test_total():
    assert total(2) == 2
def test_failing():
    assert failing() == [1]
def test_unasserted():
    unasserted(2)
@pytest.mark.slow
def test_of_another_run():
    assert unasserted(2) == 2
""",
    "tests/test_elsewhere.py": """
import subprocess, sys
def test_in_a_child():
    code = "import os; from toy.queue.elsewhere import in_a_child; os.write(1, in_a_child().encode()); os._exit(0)"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"started"
""",
    "check.py": """
import sys
sys.path.insert(0, "src")
from toy.queue.limits import failing, unasserted
sys.exit("it says no" if unasserted(2) != 2 or failing() != [] else 0)
""",
}
STATUSES = {
    "limits.py:2": "noticed",  # outside functions
    "limits.py:4": "noticed",
    "limits.py:6": "noticed",  # by the check alone
    "limits.py:8": "skipped",  # its only test fails anyway
    "limits.py:10": "survived",  # no test executes it
    **dict.fromkeys(("limits.py:12", "limits.py:14", "limits.py:15"), "noticed"),
    "fixtures.py:2": "noticed",  # in a fixture of both tests
    "elsewhere.py:2": "noticed",  # by a process that a test starts
    "admit.lua:2": "noticed",
    "scripts.py:5": "noticed",
}


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return make_checkout(tmp_path / "toy", TOY)


def make_checkout(root: Path, files: dict[str, str]) -> Path:
    write_files(root, {**files, "pyproject.toml": PYPROJECT})
    for folder in [root / "src" / "toy", *(path for path in (root / "src" / "toy").iterdir() if path.is_dir())]:
        (folder / "__init__.py").touch()
    subprocess.run(["git", "init", "--quiet", root], check=True)
    return root


def write_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def mutate(root: Path, *arguments: str, code: int = 0) -> tuple[dict[str, Any], str]:
    command = [ROOT / "scripts" / "mutate", "--root", root, "--folders", "queue", "--json", "--check", "", *arguments]
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout or "{}"), done.stderr


def test_whole_run_on_a_small_package(toy: Path) -> None:
    before = {path: path.read_bytes() for path in toy.rglob("*") if path.is_file()}
    report, log = mutate(toy, "--check", f"{sys.executable} check.py", "--at-least", "92", code=1)
    assert {
        f"{Path(mutant['path']).name}:{mutant['line']}": mutant["status"] for mutant in report["mutants"]
    } == STATUSES
    assert report["folders"] == {"queue": {"planted": 11, "noticed": 10, "survived": 1, "not judged": 0}}
    assert report["share"] == 90.9
    assert [mutant["line"] for mutant in report["mutants"] if mutant["cause"] == "check"] == [6]
    assert "7 of 8 tests pass" in log
    (caught,) = (mutant for mutant in report["mutants"] if mutant["path"].endswith(".lua"))
    assert (caught["before"], caught["after"]) == ("return a < b", "return a <= b")
    assert (caught["cause"], caught["by"]) == ("failed", "tests/queue/test_limits.py::test_script")
    assert {path: path.read_bytes() for path in toy.rglob("*") if path.is_file()} == before


UNCOLLECTED = {
    "src/toy/queue/table.py": 'LAST = "abc"[2]\n',
    "src/toy/other/once.py": "def once() -> int:\n    return 1\n",
    "tests/queue/test_table.py": "from toy.queue.table import LAST\ndef test_last():\n    assert LAST == 'c'\n",
    "tests/other/test_once.py": """
from pathlib import Path
from toy.other.once import once
Path("FOLDER/measured").mkdir()
def test_once():
    assert once() == 1
""",
}


def test_run_that_cannot_collect_is_compared_with_one_without_the_mistake(tmp_path: Path) -> None:
    """The import of `table` fails by its mistake alone; that of `test_once.py` in each process after the first."""
    files = {name: text.replace("FOLDER", str(tmp_path)) for name, text in UNCOLLECTED.items()}
    root = make_checkout(tmp_path / "toy", files)
    report, log = mutate(root, "--folders", "queue", "other", "--jobs", "1", "--at-least", "100")
    verdicts = [(mutant["path"].rpartition("/")[2], mutant["status"], mutant["cause"]) for mutant in report["mutants"]]
    assert sorted(verdicts) == [("once.py", "not judged", "crashed"), ("table.py", "noticed", "crashed")]
    assert (report["share"], report["folders"]["other"]["not judged"]) == (100.0, 1), "of those that were judged"
    assert re.search(r"not judged +src/toy/other/once\.py:2", log)
    table = in_words(report)
    assert re.search(r"(?m)^all +2 +1 +0 +1 +100\.0 %$", table)
    assert "src/toy/other/once.py:2" in table


def test_nothing_judged_is_no_success() -> None:
    assert make_report([{"path": "a.py", "status": "not judged"}], {"a": ["a.py"]})["share"] == 0.0
    assert make_report([{"path": "a.py", "status": "skipped"}], {"a": ["a.py"]})["share"] == 100.0


def test_state_is_extended_for_the_same_tree(toy: Path, tmp_path: Path) -> None:
    state = str(tmp_path / "state.jsonl")
    fewer, _ = mutate(toy, "--count", "1", "--state", state)
    more, log = mutate(toy, "--count", "3", "--state", state)
    assert more["mutants"][: len(fewer["mutants"])] == fewer["mutants"]
    judged = [mutant for mutant in more["mutants"] if mutant["status"] != "skipped"]
    assert len(judged) == 3
    assert "passed" not in log  # the tests are not measured again
    assert len(re.findall(r"(?m)^\[.*\] (noticed|survived)", log)) == 2
    _, log = mutate(toy, "--state", state, "--check", "sh -c 'echo no; exit 1'", code=1)
    assert "failed without a mistake:\nno" in log
    (toy / "src/toy/queue/limits.py").write_text("LIMIT = 4\n")
    _, log = mutate(toy, "--state", state, code=1)
    assert state in log


def test_flaky_test_loses_its_verdicts(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    state = State(path)
    for test in ("a", "b"):
        state.add(key=f"point of {test}", verdict={"status": "noticed", "by": test})
    state.add(key="point of none", verdict={"status": "not judged", "by": ""})
    state.add(sound=["a"], flaky=["b"])
    for known in (state, State(path)):
        assert known.verdicts.keys() - {"point of none"} == {"point of a"}
        assert (known.sound, known.flaky) == ({"a"}, {"b"})
    assert "point of none" in state.verdicts
    assert "point of none" not in State(path).verdicts, "it is tried again"


@pytest.mark.parametrize(
    ("entries", "code", "cause", "by"),
    [
        ([{"start": "a"}, {"end": "a"}], 0, "", ""),
        ([], 5, "", ""),
        ([{"start": "a"}, {"failed": "a"}, {"end": "a"}], 1, "failed", "a"),
        ([{"start": "a"}, {"end": "a"}, {"start": "b"}], None, "hung", "b"),
        ([{"start": "a"}], -11, "crashed", "a"),
        ([], 2, "crashed", ""),
    ],
)
def test_outcome_of_a_run(tmp_path: Path, entries: list[dict[str, str]], code: int | None, cause: str, by: str) -> None:
    notes = tmp_path / "notes"
    notes.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    outcome = outcome_of(notes, code)
    assert (outcome.cause, outcome.by) == (cause, by)


@pytest.mark.parametrize(
    ("path", "line", "names"),
    [
        ("lua/alone.lua", 2, {"alone"}),
        ("lua/parts/old.lua", 1, {"old", "alone"}),
        ("lua/several.lua", 1, {"first"}),
        ("lua/several.lua", 5, {"second"}),
        ("lua/shared.lua", 2, {"queue", "alone", "second"}),
        ("lua/shared.lua", 4, {"unused"}),
    ],
)
def test_scripts_that_hold_a_lua_line(tmp_path: Path, path: str, line: int, names: set[str]) -> None:
    files = {
        "lua/alone.lua": "-- needs: old, queue\nreturn 1\n",
        "lua/parts/old.lua": "local x = 1\n",
        "lua/several.lua": "-- Of steps.\n-- script: first\nreturn 1\n-- script: second\nreturn 2\n-- needs: queue\n",
        "lua/shared.lua": "-- part: queue\nlocal a = 1\n-- part: unused\nlocal b = 1\n",
    }
    write_files(tmp_path, files)
    pattern = script_names(tmp_path, path, line)
    everything = {"alone", "old", "first", "second", "queue", "unused", "several"}
    assert {name for name in everything if pattern.search(f'run("{name}", x)')} == names
