"""Oracle and nobody, what is left of a patch, and tests that hang or break off."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import re
import subprocess
import sys

import pytest
from tests.sandbox.server.conftest import TOKEN, serving
from tests.sandbox.swe.conftest import CONFIG, LIMITS, two_by_default
from tests.sandbox.swe.wordkit import TESTS, patch_by

from penstock.sandbox import RemoteSandbox, SandboxError, make_sandbox
from penstock.sandbox.swe import Grade, SweEnvironment, SweTaskError, check_task, grade, report
from penstock.sandbox.swe.decoys import BoxChanges, Round
from penstock.sandbox.swe.grading import _verdict
from penstock.sandbox.swe.grading_box import GradingRun

pytestmark = pytest.mark.bwrap


async def patch_of(sandbox, task, command: str, start: bytes = b"") -> bytes:
    """What a model's box gives after `command`."""
    environment = await SweEnvironment.open(sandbox, task, LIMITS)
    try:
        await environment.apply(start)
        result = await environment.run(command)
        assert result.exit_code == 0, result.stderr
        return await environment.diff()
    finally:
        await environment.close()


@pytest.mark.parametrize("name", two_by_default(TESTS))
async def test_grade_oracle_passes_and_nobody_fails(any_sandbox, tasks, name):
    found = await check_task(any_sandbox, tasks[name], LIMITS)
    assert found.problems == ()
    (oracle,), (null,) = found.oracle, found.null
    assert (oracle.resolved, oracle.share, null.resolved, null.share) == (True, 1.0, False, 0.0)
    assert null.report() == {
        "patch_successfully_applied": True,
        "resolved": False,
        "tests_status": {
            "FAIL_TO_PASS": {"success": [], "failure": TESTS[name][0]},
            "PASS_TO_PASS": {"success": TESTS[name][1], "failure": []},
        },
    }


async def test_grade_tests_that_model_touched_are_hidden_ones_again(sandbox, task):
    command = (
        "printf 'def test_slugify():\\n    1\\ndef test_slugify_takes_a_separator():\\n    1\\n' > tests/test_slug.py; "
        "echo 'addopts = broken' > pytest.ini; echo 'raise SystemExit' > tests/conftest.py; echo x > notes.md"
    )
    found = await grade(sandbox, task, await patch_of(sandbox, task, command), LIMITS)
    assert found.dropped == ("pytest.ini", "tests/conftest.py", "tests/test_slug.py")
    assert found.outcomes[task.fail_to_pass[0]] == "failed"
    assert {found.outcomes[test] for test in task.pass_to_pass} == {"passed"}
    found = await grade(sandbox, task, await patch_of(sandbox, task, command, task.patch), LIMITS)
    assert found.resolved


async def test_grade_hanging_test_fails_alone(sandbox, task):
    command = "printf '\\n\\ndef shorten(text, width):\\n    __import__(\"time\").sleep(1e6)\\n' >> wordkit/slug.py"
    found = await grade(sandbox, task, await patch_of(sandbox, task, command, task.patch), LIMITS)
    assert found.doubt == ""
    assert found.outcomes == {
        task.fail_to_pass[0]: "passed",
        task.pass_to_pass[0]: "passed",
        task.pass_to_pass[1]: "failed",
    }
    assert (found.share, found.resolved) == (0.0, False)


async def test_grade_run_that_never_ends_is_ended(sandbox, task):
    command = "echo '__import__(\"time\").sleep(1e6)' > wordkit/__init__.py"
    limits = LIMITS.model_copy(update={"tests_timeout_s": 3.0})
    found = await grade(sandbox, task, await patch_of(sandbox, task, command), limits)
    assert found.reason == "the run ended before its first test (limit wall)"
    assert set(found.outcomes.values()) == {"missing"}


def slow(task, seconds: float):
    """A hidden test that takes this long."""
    line = b'    assert slugify(title, sep="_")'
    wait = f"    __import__('time').sleep({seconds})".encode()
    longer = task.test_patch.replace(b"+" + line, b"+" + wait + b"\n+" + line)
    header = re.compile(rb"@@ (-\d+,\d+) \+(\d+),(\d+) @@")
    first = header.search(task.test_patch)
    longer = header.sub(b"@@ %s +%s,%d @@" % (*first.group(1, 2), int(first.group(3)) + 1), longer, count=1)
    return dataclasses.replace(task, instance_id=f"slow-{seconds}", test_patch=longer)


async def test_grade_limits_follow_what_the_reference_takes(sandbox, task):
    """On a busy machine both take longer than the limit."""
    limits = LIMITS.model_copy(update={"test_timeout_s": 1.5})
    found = await grade(sandbox, slow(task, 2.0), task.patch, limits)
    assert (found.resolved, found.reason) == (True, "")


@pytest.mark.parametrize("at", range(1 + LIMITS.decoys))
async def test_grade_limit_reached_in_one_box_is_reached_by_chance(sandbox, task, at, monkeypatch):
    first = await sandbox.start("a box to learn its kind")
    kind = type(first)
    await first.close()
    run, boxes = kind.run, []

    async def stalls(self, argv, **how):
        if "run_pytest" in str(argv):
            boxes.append(self)
            if len(boxes) == at + 1:
                how["timeout_s"] = 0.01
        return await run(self, argv, **how)

    monkeypatch.setattr(kind, "run", stalls)
    found = await grade(sandbox, task, task.patch, LIMITS)
    assert (found.resolved, found.reason) == (True, "")


@pytest.mark.deep
@pytest.mark.timeout(0)  # each grading has deadlines, which follow what the reference takes on this machine
async def test_grade_honest_fixes_on_a_busy_machine(sandbox, task):
    """Forty fixes of a test that computes for most of its limit, with two busy loops and other gradings beside them."""
    work = b"    __import__('hashlib').pbkdf2_hmac('sha256', b'a', b'b', 1_500_000)"
    computing = dataclasses.replace(slow(task, 0), instance_id="computes")
    computing = dataclasses.replace(
        computing, test_patch=computing.test_patch.replace(b"    __import__('time').sleep(0)", work)
    )
    quiet = await grade(sandbox, computing, task.patch, LIMITS.model_copy(update={"test_timeout_s": 60.0}))
    limits = LIMITS.model_copy(update={"test_timeout_s": 1.3 * quiet.seconds[task.fail_to_pass[0]]})
    turns = asyncio.Semaphore(2)

    async def graded_in_turn():
        async with turns:
            return await grade(sandbox, computing, task.patch, limits)

    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        graded = await asyncio.gather(*(graded_in_turn() for _ in range(40)))
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    assert [one.reason for one in graded if not one.resolved] == []


async def test_grade_true_round_is_at_a_place_of_chance(task):
    """A patch that knew the place of the true round would forge the results of that round alone."""
    wrong = (task.fail_to_pass[:1], (*task.fail_to_pass[1:], *task.pass_to_pass))
    rounds = [Round.true(task, BoxChanges()), *(Round(BoxChanges(hidden=(name,)), *wrong) for name in "ab")]

    class Boxes:
        def __init__(self):
            self.used = []

        async def run(self, _, changes):
            (one,) = (one for one in rounds if one.changes is changes)
            self.used.append(one)
            outcomes = dict.fromkeys(one.right, "passed") | dict.fromkeys(one.wrong, "failed")
            verdict = Grade(task.instance_id, outcomes, task.fail_to_pass, task.pass_to_pass)
            return GradingRun(verdict, report.TestOutcomes(outcomes, "", ""))

    orders = set()
    for _ in range(200):
        boxes = Boxes()
        assert (await _verdict(boxes, task.patch, rounds)).resolved
        orders.add(tuple(rounds.index(one) for one in boxes.used))
    assert orders == set(itertools.permutations(range(3)))


async def test_grade_patch_that_does_not_apply_is_the_models_fault(sandbox, task, tasks):
    found = await grade(sandbox, task, tasks["wordkit-2"].patch.replace(b"part", b"trap"), LIMITS)
    assert found.reason.startswith("the patch does not apply")
    assert (found.resolved, found.report()["patch_successfully_applied"]) == (False, False)


async def test_grade_patch_that_fills_the_box_is_the_models_fault(sandbox, task, tmp_path):
    bomb = (
        "(printf '\\000'; head -c 150M /dev/zero | tr '\\000' x) > bomb"  # no zeros: those git would leave out as holes
    )
    patch = patch_by(task.repository, task.base_commit, bomb, tmp_path / "tree")
    assert len(patch) < LIMITS.patch_bytes
    found = await grade(sandbox, task, patch, LIMITS)
    assert found.reason.startswith("the patch ")
    assert not found.resolved


async def test_grade_broken_task_is_nobodys_zero(sandbox, task, tasks):
    for fields, message in [
        ({"test_patch": tasks["wordkit-2"].patch.replace(b"part", b"trap")}, "test_patch does not fit"),
        ({"packages": None, "test_command": "python9 -m pytest"}, "no pytest"),
    ]:
        with pytest.raises(SweTaskError, match=message):
            await grade(sandbox, dataclasses.replace(task, **fields), task.patch, LIMITS)


async def test_grade_box_that_fails_is_nobodys_zero(sandbox, task, monkeypatch):
    first = await sandbox.start("a box that lives")
    kind = type(first)
    await first.close()
    run = kind.run

    async def dies(self, argv, **how):
        if "run_pytest" in str(argv):
            await self._box.end()
        return await run(self, argv, **how)

    monkeypatch.setattr(kind, "run", dies)
    with pytest.raises(SandboxError):
        await grade(sandbox, task, task.patch, LIMITS)


async def test_grade_any_command_can_be_the_test(sandbox, task):
    plain = dataclasses.replace(
        task,
        fail_to_pass=("tests.test_slug",),
        pass_to_pass=(),
        test_command='python3 -c \'from wordkit.slug import slugify; assert slugify("a b", "_") == "a_b"\' {test}',
    )
    found = await check_task(sandbox, plain, LIMITS)
    assert found.problems == ()


async def test_grade_build_is_run_with_the_patch_in(sandbox, task):
    built = dataclasses.replace(task, build_command="python3 -m compileall -q wordkit")
    assert (await grade(sandbox, built, task.patch, LIMITS)).resolved
    broken = await patch_of(sandbox, task, "echo 'def (' > wordkit/slug.py")
    assert (await grade(sandbox, built, broken, LIMITS)).reason == "the build failed with this patch"


async def test_grade_without_a_box_there_is_no_grade(task):
    made = make_sandbox(CONFIG, "tests-swe-image")
    with pytest.raises(SandboxError, match="docker"):
        await grade(made, dataclasses.replace(task, sandbox_image="nothing"), b"", LIMITS)
    await made.close()


async def test_grade_over_a_sandbox_server(task):
    async with serving(CONFIG) as url:
        remote = RemoteSandbox(CONFIG.model_copy(update={"backend": "remote", "url": url}), url, TOKEN)
        found = await grade(remote, task, await patch_of(remote, task, "echo note > note", task.patch), LIMITS)
        await remote.close()
    assert found.resolved
