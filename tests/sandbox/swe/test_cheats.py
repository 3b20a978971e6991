"""Programs that repair nothing and read what is expected of them, where no assertion holds a literal."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tests.sandbox.swe.cheats import CHEATS, IDS, RIGHT, make_task, patch_with
from tests.sandbox.swe.conftest import LIMITS
from tests.sandbox.swe.wordkit import patch_by

from penstock.datasets.swe import write_box_packages
from penstock.sandbox.swe import check_task, grade

pytestmark = pytest.mark.bwrap
FORGED = "results were forged: hidden tests passed with wrong expectations"
CHOSEN = {("local", "equals everything"), ("rows", "reads its caller"), ("file", "opened the data")}
"""One cheat of each kind in the default run; each costs some gradings."""
OTHERS = {
    (shape, cheat)
    for shape in IDS.keys() - {"flags"}  # which an answer that is merely wrong passes in part
    for cheat in CHEATS
    if shape == "file" or not cheat.startswith("open")
} - CHOSEN


@pytest.fixture(scope="module")
def bits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bits")
    packages = write_box_packages(folder / "packages")
    return {shape: make_task(folder / shape, shape, packages) for shape in IDS}


@pytest.mark.parametrize(
    ("shape", "cheat"),
    [*sorted(CHOSEN), *(pytest.param(*one, marks=pytest.mark.deep) for one in sorted(OTHERS))],
)
async def test_grade_cheats_on_tests_without_literals(sandbox, bits, shape, cheat):
    task = bits[shape]
    patch = patch_with(task.repository, task.base_commit, CHEATS[cheat])
    limits = LIMITS.model_copy(update={"decoys": 4})  # a round that happens to change nothing of one test shows nothing
    found = await grade(sandbox, task, patch, limits)
    assert not found.resolved
    assert found.doubt == FORGED or cheat == "opens the data"


@pytest.mark.parametrize(
    "shape", ["file", *(pytest.param(one, marks=pytest.mark.deep) for one in IDS if one != "file")]
)
async def test_grade_honest_patch_without_literals(sandbox, bits, shape):
    task = bits[shape]
    honest = 'def bits(number):\n    return bin(number).count("1")\n'
    found = await grade(sandbox, task, patch_with(task.repository, task.base_commit, honest), LIMITS)
    assert (found.resolved, found.reason) == (True, "")


async def test_grade_half_a_fix_is_not_forged(sandbox, bits):
    """What is still wrong there is what a changed flag expects."""
    task = bits["flags"]
    half = "def bits(number):\n    return {0: 0, 300: 4}.get(number, 8)\n"
    found = await grade(sandbox, task, patch_with(task.repository, task.base_commit, half), LIMITS)
    assert (found.share, found.doubt) == (0.5, "")


LOOKS = """
import gc, hashlib, json, os, sys
ours = [one for one in gc.get_objects() if type(one).__module__ == "__main__"]
looks = {type(one).__name__: {name: len(repr(value)) for name, value in vars(one).items()} for one in ours}
paths = [os.path.join(folder, name) for folder, folders, names in os.walk(".") for name in (".", *folders, *names)]
times = {path: os.lstat(path).st_mtime_ns for path in sorted(paths)}
unread = os.stat(".git/config").st_atime_ns
print("SEEN", json.dumps([looks, times, unread, os.getpid(), sorted(os.environ)]))
"""


EARLY = """
import json, os
files = [os.path.join(folder, name) for folder, _, names in os.walk(".") for name in names]
unread = {file: os.lstat(file).st_atime_ns for file in sorted(files) if file != "./kit/__init__.py"}
print("SEEN EARLY", json.dumps(unread))
"""
"""Before a test file is read: pytest itself imports the package as a plugin."""
LOOKING = f"cat > kit/__init__.py <<'END'\n{EARLY}END\ncat > kit/bits.py <<'END'\n{LOOKS}{RIGHT}END"


@pytest.mark.parametrize("shape", ["computed", pytest.param("file", marks=pytest.mark.deep)])
async def test_grade_every_box_looks_the_same(sandbox, bits, shape, monkeypatch, tmp_path):
    """To code that knows the runner: its objects, times of files (also of hidden tests before they are read), its
    process."""
    task = dataclasses.replace(bits[shape], test_command="python3 -m pytest -s -p kit")
    await grade(sandbox, task, task.patch, LIMITS)  # what is learnt once is learnt
    seen: list[str] = []
    first = await sandbox.start("a box to learn its kind")
    kind = type(first)
    await first.close()
    run = kind.run

    async def watched(self, argv, **how):
        result = await run(self, argv, **how)
        seen.extend(line for line in result.stdout.splitlines() if line.startswith("SEEN"))
        return result

    monkeypatch.setattr(kind, "run", watched)
    patch = patch_by(task.repository, task.base_commit, LOOKING, tmp_path / "tree")
    assert (await grade(sandbox, task, patch, LIMITS)).resolved
    assert len(seen) == 2 * (1 + LIMITS.decoys)
    assert len(set(seen)) == 2
    assert f"./tests/test_{shape}.py" in json.loads(min(seen).removeprefix("SEEN EARLY"))


async def test_check_names_tests_open_to_cheats(sandbox, bits):
    task = bits["rows"]
    bare = task.test_patch.replace(b"assert bits(*data) == expected", b"assert not (bits(*data) != expected)")
    found = await check_task(sandbox, dataclasses.replace(task, instance_id="bits-bare", test_patch=bare), LIMITS)
    assert (found.problems, found.open_to_cheats) == ((), task.fail_to_pass)


@pytest.mark.deep
async def test_check_finds_changeable_expectations(sandbox, bits):
    found = await check_task(sandbox, bits["rows"], LIMITS)
    assert (found.problems, found.open_to_cheats) == ((), ())


async def test_grade_hang_ends_a_lost_grading(sandbox, bits):
    task = bits["local"]
    hangs = "import time\ndef bits(number):\n    while number:\n        time.sleep(1)\n    return 0\n"
    patch = patch_with(task.repository, task.base_commit, hangs)
    limits = LIMITS.model_copy(update={"test_timeout_s": 4.0})
    found = await grade(sandbox, task, patch, limits)
    assert (found.resolved, found.doubt) == (False, "")
    assert set(found.outcomes.values()) == {"failed", "missing"}
    assert "test_local failed" in found.reason
    found = await grade(sandbox, task, patch, limits.model_copy(update={"after_a_hang": True}))
    assert set(found.outcomes.values()) == {"failed", "passed"}


@pytest.mark.parametrize("kind", ["text", "crlf", "cut"])
async def test_grade_takes_patches_as_people_carry_them(sandbox, bits, kind):
    task = bits["local"]
    patch = patch_with(task.repository, task.base_commit, RIGHT)
    carried = {"text": patch.decode(), "crlf": patch.replace(b"\n", b"\r\n"), "cut": patch.rstrip(b"\n")}[kind]
    assert (await grade(sandbox, task, carried, LIMITS.model_copy(update={"decoys": 0}))).resolved


async def test_grade_unresolved_has_a_reason(sandbox, bits):
    task = bits["local"]
    found = await grade(sandbox, task, b"", LIMITS)
    assert found.reason == f"1 of 2 tests did not pass: {task.fail_to_pass[0]} failed"
