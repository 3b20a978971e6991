"""Patches that want to be believed without repairing anything. None of them is."""

from __future__ import annotations

import pytest
from tests.sandbox.swe.conftest import LIMITS
from tests.sandbox.swe.wordkit import patch_by

from penstock.sandbox.swe import grade

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


@pytest.mark.parametrize("attack", NOT_TAKEN)
async def test_what_steers_the_tests_is_not_taken_from_a_patch(sandbox, task, attack, tmp_path):
    patch = patch_by(task.repository, task.base_commit, NOT_TAKEN[attack], tmp_path / "tree")
    found = await grade(sandbox, task, patch, LIMITS)
    assert found.outcomes[task.fail_to_pass[0]] == "failed"
    assert {found.outcomes[test] for test in task.pass_to_pass} == {"passed"}
    assert (found.reason, found.share) == ("", 0.0)


@pytest.mark.parametrize("attack", NOT_BELIEVED)
async def test_what_the_code_says_of_itself_is_not_believed(sandbox, task, attack, tmp_path):
    command = IN_CODE.format(NOT_BELIEVED[attack])
    patch = patch_by(task.repository, task.base_commit, command, tmp_path / "tree")
    found = await grade(sandbox, task, patch, LIMITS)
    assert (found.resolved, found.share) == (False, 0.0)
    if attack in ("tests do nothing", "failures are forgiven", "reports are bent"):
        assert found.reason == "results were forged: tests that must fail did not"
    if attack.startswith("exits"):
        assert found.reason.startswith("the run ended before its")
