"""Patches that want to be believed without repairing anything. None of them is."""

from __future__ import annotations

import dataclasses
import os

import pytest
from tests.sandbox.swe.conftest import LIMITS, sandbox_with, two_by_default
from tests.sandbox.swe.wordkit import patch_by

from penstock.sandbox.swe import check_task, grade

pytestmark = pytest.mark.bwrap
IN_CODE = "cat >> wordkit/slug.py <<'END'\n{}\nEND"
PASSES = "tests/test_slug.py::test_slugify_takes_a_separator PASSED\n============ 3 passed in 0.01s ============"
PRETENDING = (
    "import pytest\n@pytest.hookimpl(hookwrapper=True)\n"
    "def pytest_runtest_makereport(item, call):\n    call.excinfo = None\n    yield"
)

PLUGIN = f"printf '%s' '{PRETENDING}' > p.py; "
NOT_TAKEN = {
    "by every way at once": PLUGIN
    + "cp p.py conftest.py; cp p.py tests/conftest.py; printf '[pytest]\\naddopts = -p p\\n' > pytest.ini; "
    "mkdir w.egg-info; printf 'Metadata-Version: 2.1\\nName: w\\nVersion: 1\\n' > w.egg-info/PKG-INFO; "
    "printf '[pytest11]\\np = p\\n' > w.egg-info/entry_points.txt; "
    "echo 'import os; os._exit(0)' | tee sitecustomize.py usercustomize.py pytest.py json.py hmac.py > random.py; "
    "mkdir _pytest tests/__pycache__; touch _pytest/__init__.py; printf x > tests/__pycache__/test_slug.pyc",
    "tests by a link": "mkdir mine; printf 'def test_slugify_takes_a_separator():\\n    pass\\n' > mine/test_slug.py; "
    "rm -r tests; ln -s mine tests",
    "tests by a file": "rm -r tests; echo > tests",
}
"""Changes that grading leaves out, or that change nothing there."""
NOT_BELIEVED = {
    "tells": f"import glob\nprint('''{PASSES}''')\n"
    "open('/tmp/report.xml', 'w').write('<testsuite tests=\"3\" failures=\"0\"/>')\n"
    "for name in glob.glob('/tmp/.penstock_swe/results*'):\n"
    "    open(name, 'a').write('0 {\"kind\": \"end\"}\\n')",
    "exits at once": f"import os\nprint('''{PASSES}''', flush=True)\nos._exit(0)",
    "exits in a test": "import os\ndef slugify(*_, **__):\n    os._exit(0)",
    "skips": "import unittest\ndef slugify(*_, **__):\n    raise unittest.SkipTest",
    "expects failure": "import pytest\ndef slugify(*_, **__):\n    pytest.xfail()",
    "tests do nothing": "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None",
    "failures are forgiven": "import _pytest.runner\n"
    "forgive = lambda c, f, when, **k: c(None, None, 0.0, 0.0, 0.0, when, _ispytest=True)\n"
    "_pytest.runner.CallInfo.from_call = classmethod(forgive)",
    "reports are bent": "import _pytest.reports\n"
    "_pytest.reports.TestReport.outcome = property(lambda self: 'passed', lambda self, value: None)",
    "results taken away": "import glob, os\nfor name in glob.glob('/tmp/.penstock_swe/*'):\n"
    "    os.path.isdir(name) or os.unlink(name)",
    "runner killed": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "assertions are another's": "import builtins, unittest\nbuiltins.AssertionError = unittest.SkipTest",
}
"""What the code under test does when it is imported, or called."""


@pytest.mark.parametrize("attack", two_by_default(NOT_TAKEN))
async def test_grade_what_steers_the_tests_is_not_taken_from_a_patch(sandbox, task, attack, tmp_path):
    patch = patch_by(task.repository, task.base_commit, NOT_TAKEN[attack], tmp_path / "tree")
    found = await grade(sandbox, task, patch, LIMITS)
    assert found.outcomes[task.fail_to_pass[0]] == "failed"
    assert {found.outcomes[test] for test in task.pass_to_pass} == {"passed"}
    assert (found.doubt, found.share) == ("", 0.0)


async def test_grade_a_path_too_long_to_be_laid_out_is_the_patchs_own_failure(sandbox, task):
    """git writes it, relative to its folder, and no other program can name it: no fault of the box, and not retried."""
    path = "/".join(["d" * 200] * 21)[:4094]
    patch = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+x\n"
    verdict = await grade(sandbox, task, patch, LIMITS)
    assert (verdict.resolved, verdict.share) == (False, 0.0)
    assert verdict.doubt.startswith("the patch cannot be laid out: ")


@pytest.mark.parametrize("attack", two_by_default(NOT_BELIEVED))
async def test_grade_what_the_code_says_of_itself_is_not_believed(sandbox, task, attack, tmp_path):
    command = IN_CODE.format(NOT_BELIEVED[attack])
    patch = patch_by(task.repository, task.base_commit, command, tmp_path / "tree")
    found = await grade(sandbox, task, patch, LIMITS)
    assert (found.resolved, found.share) == (False, 0.0)
    if attack in ("tests do nothing", "failures are forgiven", "reports are bent"):
        assert found.reason == "results were forged: tests that must fail did not"
    if attack.startswith("exits"):
        assert found.reason.startswith("the run ended before its")


WITNESS = (
    "import gc\nwitness = next(one for one in gc.get_objects() if type(one).__name__ == 'OutcomeReporter')\n"
    "honest = witness.sign\n"
)
AGAINST_THIS_RUNNER = {
    "signs for itself": WITNESS + "canaries = []\n"
    "def sign(record):\n"
    "    if record['kind'] == 'canaries':\n        canaries.extend(record['tests'])\n"
    "    if record['kind'] == 'test' and record['test'] not in canaries:\n        record['outcome'] = 'passed'\n"
    "    honest(record)\n"
    "witness.sign = sign",
    "knows canaries by their code": "import _pytest.python\n"
    "honest = _pytest.python.Function.runtest\n"
    "def runtest(self):\n"
    "    if set(self.function.__code__.co_names) <= {'AssertionError', 'ValueError'}:\n        honest(self)\n"
    "_pytest.python.Function.runtest = runtest",
    "equals everything": "class Any(str):\n    __eq__ = lambda self, other: True\n    __hash__ = str.__hash__\n"
    "def slugify(*_, **__):\n    return Any()",
}
"""What code can do that knows every line of the runner: each of these was believed before there were decoys."""


@pytest.mark.parametrize("attack", two_by_default(AGAINST_THIS_RUNNER))
async def test_grade_decoys_stop_patches_that_know_the_runner(sandbox, task, attack, tmp_path):
    command = IN_CODE.format(AGAINST_THIS_RUNNER[attack])
    patch = patch_by(task.repository, task.base_commit, command, tmp_path / "tree")
    found = await grade(sandbox, task, patch, LIMITS)
    assert found.reason == "results were forged: hidden tests passed with wrong expectations"
    assert (found.resolved, found.share) == (False, 0.0)
    unguarded = await grade(sandbox, task, patch, LIMITS.model_copy(update={"decoys": 0}))
    assert unguarded.resolved, "the attack itself works: it is the decoys that stop it"


TELLS = {
    "what a hang would end": "witness.needed",
    "when its tests were written": "os.stat(TESTS).st_mtime_ns != os.stat(__file__).st_mtime_ns",
    "when its tests were read": "os.stat(TESTS).st_atime_ns != os.stat(__file__).st_atime_ns",
    "how many programs ran before": "os.getpid() & 2",
}
"""What differed between the box with the right expectations and the others: each was resolved with certainty."""
TIMES = [1, pytest.param(40, marks=[pytest.mark.deep, pytest.mark.timeout(2400)])]


def forging(tell: str, *before: str) -> str:
    """Forges its results in a box where `tell` holds, and repairs nothing."""
    *lines, forge = AGAINST_THIS_RUNNER["signs for itself"].splitlines()
    return "\n".join([*lines, "import os", "TESTS = 'tests/test_slug.py'", *before, f"if {tell}:", f"    {forge}"])


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("tell", two_by_default(TELLS))
async def test_grade_no_box_is_told_from_the_others(sandbox, task, tell, times, tmp_path):
    """A patch that forges its results in the true box alone would pass. Every second one takes the tell for that of a
    decoy."""
    codes = [forging(TELLS[tell]), forging(f"not ({TELLS[tell]})")]
    patches = [
        patch_by(task.repository, task.base_commit, IN_CODE.format(code), tmp_path / f"tree{number}")
        for number, code in enumerate(codes)
    ]
    verdicts = [await grade(sandbox, task, patches[number % 2], LIMITS) for number in range(times)]
    assert sum(verdict.resolved for verdict in verdicts) == 0


PAGES = 16
IS_FIRST = f"""\
import time
def was_cold(file, at):
    times = []
    for _ in range(2):
        began = time.perf_counter_ns()
        os.pread(file, 1, at)
        times.append(time.perf_counter_ns() - began)
    return times[0] > 5 * times[1]
file = os.open('/shared/file', os.O_RDONLY)
is_first = sum(was_cold(file, number << 20) for number in range({PAGES})) > {PAGES // 2}"""
"""True in the first box that reads the file: a first read of a page that is in memory takes as long as a second one.

The attack measures times, no assertion does: a busy machine makes the attack worse, and 0 passes hold.
"""


class NothingCleaned:
    """Boxes of `sandbox` that leave in the kernel's caches what they read."""

    def __init__(self, sandbox):
        self._sandbox = sandbox

    async def start(self, label, *, image=None, needs=None):
        return await self._sandbox.start(label, image=image)


async def resolved_by_pages(boxes, task, file, patch, times):
    """Returns the number of `times` gradings that `patch` passes. It forges in the first box alone, and the first of
    three boxes is the true one in a third of the gradings."""
    resolved = 0
    for _ in range(times):
        with file.open("r+b") as shared:
            os.fsync(shared.fileno())
            os.posix_fadvise(shared.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        resolved += (await grade(boxes, task, patch, LIMITS)).resolved
    return resolved


@pytest.mark.parametrize("times", TIMES)
async def test_grade_no_box_learns_from_shared_pages_that_another_was_before_it(task, times, tmp_path):
    """The patch measures how long reads take, because `mincore` is refused. Without a clean cache it passes in about 13
    of 40 gradings, so one is enough to show that the attack works here."""
    file = tmp_path / "shared" / "file"
    file.parent.mkdir()
    file.write_bytes(os.urandom(PAGES << 20))
    code = forging("is_first", *IS_FIRST.splitlines())
    patch = patch_by(task.repository, task.base_commit, IN_CODE.format(code), tmp_path / "tree")
    async with sandbox_with("bwrap", folders={"/shared": str(file.parent)}) as boxes:
        if "cgroup v" not in boxes.containment:  # docs/guide/swe.md: the caches of such boxes remain open
            pytest.skip(f"boxes have no cgroup here, whose end empties the cache: {boxes.containment}")
        assert await resolved_by_pages(boxes, task, file, patch, times) == 0
        if times > 1:
            assert await resolved_by_pages(NothingCleaned(boxes), task, file, patch, times) > 0


async def test_grade_nothing_in_box_tells_what_hidden_tests_are(sandbox, task, tmp_path):
    """Beside their own files, where a wrong expectation may stand."""
    look = (
        "import os, subprocess\n"
        "search = 'git grep -l takes_a_sep $(git rev-list --all; git fsck --lost-found | cut -d\" \" -f3)'\n"
        "found = subprocess.run(['sh', '-c', search], capture_output=True, text=True).stdout\n"
        "times = {os.stat(path).st_mtime_ns for path in (__file__, 'tests', 'tests/test_slug.py')}\n"
        "listed = sorted(os.listdir('/tmp/.penstock_swe'))\n"
        "raise RuntimeError(f\"{listed} {found or 'nothing'} in git, {len(times)} time\")"
    )
    patch = patch_by(task.repository, task.base_commit, IN_CODE.format(look), tmp_path / "tree")
    found = await grade(sandbox, task, patch, LIMITS)
    (said,) = {line for line in found.output.splitlines() if line.startswith("E   RuntimeError")}
    assert "base.git" not in said
    assert ".patch" not in said
    assert said.endswith("nothing in git, 1 time")


REBUILT = {
    "rewrites a hidden test": "open('tests/test_slug.py', 'w').write('def test_slugify_takes_a_separator(): pass')",
    "takes a test away": "import os; os.unlink('tests/test_money.py')",
    "brings a conftest": "open('conftest.py', 'w').write('')",
    "puts a link in its place": "import os; os.rename('tests', 'old'); os.symlink('old', 'tests')",
}


@pytest.mark.parametrize("attack", two_by_default(REBUILT))
async def test_grade_build_cannot_put_other_tests_in(sandbox, task, attack, tmp_path):
    built = dataclasses.replace(task, build_command="if [ -e setup.py ]; then python3 setup.py; fi")
    patch = patch_by(
        task.repository, task.base_commit, f"cat > setup.py <<'END'\n{REBUILT[attack]}\nEND", tmp_path / "tree"
    )
    found = await grade(sandbox, built, patch, LIMITS)
    assert found.reason == "the build changed tests, or what steers them"
    assert not found.resolved


async def test_grade_build_cannot_change_pytest(sandbox, task, tmp_path):
    """Its packages lie in the box, where the build can write: they are laid out again."""
    attack = (
        "import _pytest.python\npath = _pytest.python.__file__\ntext = open(path).read()\n"
        "open(path, 'w').write(text + '\\nFunction.runtest = lambda self: None\\n')"
    )
    built = dataclasses.replace(task, build_command="if [ -e setup.py ]; then python3 setup.py; fi")
    patch = patch_by(task.repository, task.base_commit, f"cat > setup.py <<'END'\n{attack}\nEND", tmp_path / "tree")
    found = await grade(sandbox, built, patch, LIMITS)
    assert (found.doubt, found.outcomes[task.fail_to_pass[0]]) == ("", "failed")


async def test_grade_honest_build_is_let_be(sandbox, task):
    build = (
        "mkdir -p build tests/built wordkit.egg-info; echo x | tee build/x tests/built/x.so wordkit.egg-info/PKG-INFO"
    )
    assert (await check_task(sandbox, dataclasses.replace(task, build_command=build), LIMITS)).problems == ()
