"""Programs on test cases in real boxes: what passes, what does not, and what is nobody's fault."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.agent_loops import AgentConfig, InfraFailure
from penstock.agent_loops.rewards import Answer, RewardFunction, load_reward
from penstock.agent_loops.rewards.programs import Programs
from penstock.sandbox import Sandbox, SandboxConfig, SandboxError, Session, make_sandbox

BACKENDS = [
    "unsafe_subprocess",
    pytest.param(
        "bwrap",
        marks=[
            pytest.mark.bwrap,
            pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed"),
        ],
    ),
]


@pytest.fixture(params=BACKENDS)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    made = make_sandbox(SandboxConfig(backend=request.param, max_boxes=2), "tests-rewards")
    yield made
    await made.close()


@pytest.fixture
async def plain() -> AsyncIterator[Sandbox]:
    made = make_sandbox(SandboxConfig(backend="unsafe_subprocess", max_boxes=2), "tests-rewards")
    yield made
    await made.close()


def python(code: str) -> str:
    return f"Here it is.\n```python\n{code}\n```"


ADD = json.dumps({"inputs": ["1 2\n", "3 4\n", "10 -10\n"], "outputs": ["3\n", "7\n", "0\n"]})
SUM = {"fn_name": "total", "inputs": ["[1, 2, 3]", "[]"], "outputs": ["6", "0"]}
ASSERTIONS = {
    "inputs": ["", ""],
    "outputs": ["", ""],
    "assert_case": ["assert double(2) == 4", "assert double(0) == 0"],
}


async def score(sandbox: Sandbox, code: str, cases: Any, timeout_s: float = 60.0, **settings: Any) -> dict[str, float]:
    found = await Programs(sandbox, timeout_s=timeout_s, **settings).score(Answer("taco", python(code), cases))
    assert isinstance(found, dict)
    return found


async def test_all_three_shapes_in_every_box(sandbox: Sandbox) -> None:
    right = "a, b = map(int, input().split())\nprint(a + b)"
    assert (await score(sandbox, right, ADD)) == {"score": 1.0, "tests": 3, "passed": 3, "no_code": 0}
    assert (await score(sandbox, "class Solution:\n  def total(self, n: List[int]): return sum(n)", SUM))[
        "score"
    ] == 1.0
    assert (await score(sandbox, "def double(x): return 2 * x", ASSERTIONS))["score"] == 1.0
    assert (await score(sandbox, "def double(x): return x + 2", ASSERTIONS))["score"] == 0.0


async def test_a_program_that_reads_stdin_in_every_way(plain: Sandbox) -> None:
    for reading in ("sys.stdin.read()", "open(0).read()", "sys.stdin.buffer.read().decode()", "input()"):
        code = f"from __future__ import annotations\nimport sys\nprint(sum(map(int, {reading}.split())))"
        assert (await score(plain, code, ADD))["score"] == 1.0, reading


async def test_partial_credit_and_where_the_first_failure_ends_it(plain: Sandbox) -> None:
    code = "a, b = map(int, input().split())\nprint(a + b if a < 10 else 'no')"
    assert (await score(plain, code, ADD, partial=True))["score"] == pytest.approx(2 / 3)
    assert (await score(plain, "print(3)", ADD)) == {"score": 0.0, "tests": 3, "passed": 1, "no_code": 0}
    assert (await score(plain, code, ADD, max_tests=2))["score"] == 1.0


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos._exit(0)",
        "raise SystemExit(0)",
        "print('true')",
        "import sys\nsys.stdin = None\ndef double(x): raise KeyError",
        "while True: pass",
        "def double(x",
        "import os\nopen('solution.py', 'w').write('def double(x): return 2 * x')",
    ],
)
async def test_what_does_not_do_the_work_does_not_pass(plain: Sandbox, code: str) -> None:
    assert (await score(plain, code, ASSERTIONS, timeout_s=0.5, partial=True))["score"] == 0.0


EQUAL_TO_ALL = """
class Equal:
    def __getattr__(self, name): return lambda *a: True
    def __eq__(self, other): return True
    def __bool__(self): return True
    __sub__ = __rsub__ = lambda self, other: 0
    def __hash__(self): return 0
def double(x): return Equal()
"""
CALLERS_FRAME = """
import re, sys
def double(x):
    seen, frame = "", sys._getframe()
    while frame := frame.f_back:
        seen += str(frame.f_locals)
    found = re.search(r"== *(-?\\d+)", seen)
    return int(found[1]) if found else None
"""
FORGED_WORD = """
import os, re, sys
def double(x):
    frame = sys._getframe()
    while frame.f_back.f_back:
        frame = frame.f_back
    seen = str(frame.f_locals) + str(frame.f_back.f_locals)
    os.write(1, re.search(r"'word': '(\\w+)'", seen)[1].encode() + b"true\\n")
    os._exit(0)
"""


@pytest.mark.parametrize("code", [EQUAL_TO_ALL, CALLERS_FRAME, FORGED_WORD], ids=["equal", "frame", "word"])
async def test_assertions_cannot_be_forged(plain: Sandbox, code: str) -> None:
    assert (await score(plain, code, ASSERTIONS, partial=True))["score"] == 0.0


async def test_assertions_compare_what_python_would(plain: Sandbox) -> None:
    cases = [
        "assert set(pair(2)) == {2, 3}",
        "assert pair(2) == (2, 3) and not pair(2) == [2, 3]",
        "assert abs(pair(0.5)[0] - 0.5) < 1e-9, 'the first one'",
        "box = Box()\nbox.put(4)\nassert box.all == {4: None}\nassert isinstance(box.all, (dict, list))",
        "assert Box() is not None",
        "assert pair(b'a'[0]) == tuple([97, 98])",
        "assert list(count(3)) == [0, 1, 2] and sorted(count(2)) == [0, 1]",
        "assert len(Box()) == 7 and str(Box()) == 'a box' and list(count(1))",
        "assert Box().has(3)",
    ]
    code = "def pair(x): return x, x + 1\nclass Box:\n all = {}\n def put(self, x): self.all[x] = None"
    code += "\n def __len__(self): return 7\n def __str__(self): return 'a box'\n def has(self, x): return x == 3"
    code += "\ndef count(n): yield from range(n)"
    assert (await score(plain, code, cases, partial=True))["passed"] == len(cases)


FORGED_HARNESS = """
import json, sys
job = json.loads(sys.stdin.readline())
print(job["word"] + "[0]")
"""
FORGED_LIBRARY = """
def loads(text):
    word = text.split(b'"word": "')[1].split(b'"')[0].decode()
    print(word + "[0]")
    raise SystemExit(0)
def dumps(value):
    return "[0]"
"""


@pytest.mark.parametrize(("name", "text"), [("harness.py", FORGED_HARNESS), ("json.py", FORGED_LIBRARY)])
async def test_a_test_cannot_change_what_judges_the_next_one(plain: Sandbox, name: str, text: str) -> None:
    code = f"open({name!r}, 'w').write({text!r})\ndef double(x): return 4"
    found = await score(plain, code, ASSERTIONS, partial=True)
    assert (found["passed"], found["tests"]) == (1, 2)


async def test_slow_programs_use_up_the_budget(plain: Sandbox) -> None:
    code = "import time\ntime.sleep(0.4)\na, b = map(int, input().split())\nprint(a + b)"
    found = await score(plain, code, ADD, partial=True, budget_s=0.2)
    assert (found["passed"], found["tests"]) == (1, 3)


async def test_no_code_is_a_zero_and_no_cases_are_a_failure(plain: Sandbox) -> None:
    found = await Programs(plain).score(Answer("taco", "```cpp\nint x;\n```", ADD))
    assert (found["score"], found["no_code"]) == (0.0, 1)
    with pytest.raises(InfraFailure, match="code: no test cases"):
        await Programs(plain).score(Answer("taco", python("x = 1"), "{}"))


async def test_by_the_name_of_a_data_source(plain: Sandbox, tasks_of, tmp_path) -> None:
    reward = load_reward(AgentConfig(reward="by_data_source"), tmp_path, plain)
    (task,) = tasks_of(data_source="codecontests", ground_truth=ADD)
    found = await reward.score(task, python("print(sum(map(int, input().split())))"), {})
    assert (found.reward, found.metrics["reward/passed"]) == (1.0, 3.0)


class BrokenSandbox:
    async def start(self, label: str, *, image: str | None = None) -> Session:
        raise SandboxError("no box today")


async def test_programs_sandbox_failure_is_no_zero(tasks_of) -> None:
    (task,) = tasks_of(data_source="taco", ground_truth=ADD)
    with pytest.raises(InfraFailure, match="no box today") as failure:
        await RewardFunction(Programs(BrokenSandbox()), "code").score(task, python("print(1)"), {})
    assert failure.value.component == "sandbox"


BETWEEN_TESTS = {
    "a folder in place of its file": "import os\nos.unlink('solution.py')\nos.mkdir('solution.py')",
    "a folder in place of the harness": "import os\nos.unlink('harness.py')\nos.mkdir('harness.py')",
    "a pipe in place of its file": "import os\nos.unlink('solution.py')\nos.mkfifo('solution.py')",
    "no access to its folder": "import os\nos.chmod('.', 0)\nassert os.getuid() == 0 or not os.access('.', os.W_OK)",
}


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("door", BETWEEN_TESTS)
async def test_a_program_that_breaks_its_box_between_two_tests_has_failed(
    sandbox: Sandbox, door: str, partial: bool
) -> None:
    cases = {"inputs": ["1", "2"], "outputs": ["2", "3"], "fn_name": "f"}
    code = f"def f(number):\n    return number + 1\n{BETWEEN_TESTS[door]}"
    value = await score(sandbox, code, cases, partial=partial)
    assert value["score"] <= 0.5 or "no access" in door  # root has access
