"""Packages with two or three wrong lines, and conversations that repair some of them: most stop too early.

    python -m penstock.recipes.swe.learn_data --out data/swe-learn

learn_package/ has a function per file, and check.py, which says what is wrong first. A task is that package with
another operator or constant in two or three files, and its tests hidden. Writes repositories/ (a folder per task),
train.parquet and eval.parquet, which share no task, train.jsonl and eval.jsonl with the same tasks for
`penstock data swe-check`, and conversations.jsonl for the cold start. What those write is right; but behind `STOPS` of
the checks that still fail they submit all the same.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from penstock.datasets import Row, write_parquet
from penstock.recipes.swe.agent import SYSTEM
from penstock.recipes.swe.learn_package import check

PACKAGE = Path(__file__).parent / "learn_package"
BUGS = (2, 3)
"""Numbers of bugs in a task."""
STOPS = 0.65
"""Share of the cold start's failing checks behind which it submits."""
SPLITS = {"train": 32, "eval": 16}
"""Tasks of each."""
BOX_FOLDER = "/tmp/repo"  # noqa: S108 - the box's own
CHECK_COMMAND = "python3 -B check.py"
"""Without byte code: a file that is edited twice in a second would be run from what it was before."""
FAILED = "\n[exit status 1]"
"""Added by the shell tool to a check that fails."""
PASSES = "all examples hold"
HIDDEN = "tests/test_package.py"
HIDDEN_ID = "tests.test_package"
TEST_COMMAND = "python3 -m unittest {test}"
"""One process for all hidden tests: pytest, with its canaries and decoys, costs ten times as much."""
Message = Mapping[str, Any]
Move = tuple[str, Mapping[str, str]]
"""A call: the tool's name, its arguments."""


@dataclass(frozen=True, slots=True)
class LineBug:
    """One file of the package with another expression behind its `return`."""

    file: str
    number: int
    wrong: str
    right: str

    @property
    def function(self) -> str:
        return self.file.removesuffix(".py")

    def text(self, expression: str) -> str:
        """The file with `expression` in it."""
        return right_text(self.file).replace(self.right, expression)


@dataclass(frozen=True, slots=True)
class BrokenPackage:
    """A task: bugs of different files, in the order in which check.py finds them."""

    bugs: tuple[LineBug, ...]

    @property
    def name(self) -> str:
        return "_".join(f"{bug.function}-{bug.number}" for bug in self.bugs)

    @property
    def request(self) -> str:
        return f"Make check.py pass. It says: {complaint(self.bugs[0])}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    parser.add_argument("--conversations", type=int, default=2400, help="episodes of the cold start")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    seen: set[BrokenPackage] = set()
    for split, count in SPLITS.items():
        dice = Random(f"{split}/{options.seed}")
        write_tasks([new_package(dice, seen) for _ in range(count)], split, options.out)
    dice = Random(f"conversations/{options.seed}")
    conversations = [shown_episode(shown_package(dice, without=seen), dice) for _ in range(options.conversations)]
    lines = "".join(json.dumps({"messages": messages}) + "\n" for messages in conversations)
    (options.out / "conversations.jsonl").write_text(lines, encoding="utf-8")
    print(f"{options.out}: {len(seen)} tasks, {len(conversations)} conversations")


# ---- bugs
@cache
def right_text(file: str) -> str:
    return (PACKAGE / file).read_text(encoding="utf-8")


@cache
def complaint(bug: LineBug) -> str:
    """Returns what check.py prints if this bug is the first."""
    names: dict[str, Any] = {}
    exec(bug.text(bug.wrong), names)  # noqa: S102 - a line of learn_package
    return str(check.complaint(bug.function, names[bug.function]))


@cache
def bugs_of(function: str) -> tuple[LineBug, ...]:
    """Three wrong lines of a function that returns ``name operator operand``: another operator, or another constant."""
    file = f"{function}.py"
    right = right_text(file).partition("return ")[2].strip()
    left, operator, operand = right.split()
    if operand.isdigit():
        wrong = [f"{left} {operator} {int(operand) + step}" for step in (-2, -1, 1)]
    else:
        families = (("+", "-", "*", "//"), ("<", "<=", ">", ">="))
        family = next(operators for operators in families if operator in operators)
        wrong = [f"{left} {other} {operand}" for other in family if other != operator]
    return tuple(LineBug(file, number, expression, right) for number, expression in enumerate(wrong))


def new_package(dice: Random, seen: set[BrokenPackage]) -> BrokenPackage:
    """One that is not in `seen`, which has it then."""
    package = random_package(dice, without=seen)
    seen.add(package)
    return package


def random_package(dice: Random, *, without: set[BrokenPackage]) -> BrokenPackage:
    functions = list(check.EXAMPLES)
    while True:
        broken = sorted(dice.sample(functions, dice.choice(BUGS)), key=functions.index)
        package = BrokenPackage(tuple(dice.choice(bugs_of(function)) for function in broken))
        if package not in without:
            return package


def shown_package(dice: Random, *, without: set[BrokenPackage]) -> BrokenPackage:
    """Return a package whose first bug is in each function equally often: check.py finds late functions first in few.

    The first bug is always repaired, so each repair is shown often enough to be learned.
    """
    functions = list(check.EXAMPLES)
    while True:
        first = dice.randrange(len(functions))
        later = functions[first + 1 :]
        broken = sorted(dice.sample(later, min(dice.choice(BUGS) - 1, len(later))), key=functions.index)
        package = BrokenPackage(tuple(dice.choice(bugs_of(function)) for function in (functions[first], *broken)))
        if package not in without:
            return package


# ---- tasks
def write_tasks(packages: Sequence[BrokenPackage], split: str, out: Path) -> None:
    fields = [task_fields(one, write_repository(one, out)) for one in packages]
    write_parquet([task_row(one, split, index) for index, one in enumerate(fields)], out / f"{split}.parquet")
    lines = "".join(json.dumps(one) + "\n" for one in fields)
    (out / f"{split}.jsonl").write_text(lines, encoding="utf-8")


def write_repository(broken: BrokenPackage, out: Path) -> str:
    """The broken package without its tests; the folder's path in `out`."""
    inside = f"repositories/{broken.name}"
    shutil.copytree(PACKAGE, out / inside, ignore=shutil.ignore_patterns("tests", "__pycache__"), dirs_exist_ok=True)
    for bug in broken.bugs:
        (out / inside / bug.file).write_text(bug.text(bug.wrong), encoding="utf-8")
    return inside


def task_fields(broken: BrokenPackage, repository: str) -> dict[str, Any]:
    """Returns the fields that `penstock.sandbox.swe.SweTask.from_row` reads."""
    return {
        "instance_id": broken.name,
        "repository": repository,
        "problem_statement": broken.request,
        "FAIL_TO_PASS": [HIDDEN_ID],
        "test_patch": diff(HIDDEN, None, right_text(HIDDEN)),
        "patch": "".join(diff(bug.file, bug.text(bug.wrong), bug.text(bug.right)) for bug in broken.bugs),
        "test_command": TEST_COMMAND,
    }


def diff(path: str, old: str | None, new: str) -> str:
    """Returns a change as git writes it; `old` None: the file is new."""
    before = "/dev/null" if old is None else f"a/{path}"
    lines = unified_diff((old or "").splitlines(keepends=True), new.splitlines(keepends=True), before, f"b/{path}")
    head = [f"diff --git a/{path} b/{path}\n", *(["new file mode 100644\n"] if old is None else [])]
    return "".join([*head, *lines])


def task_row(fields: Mapping[str, Any], split: str, index: int) -> Row:
    return {
        "data_source": "swe",
        "prompt": [{"role": "user", "content": fields["problem_statement"]}],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": fields["instance_id"]},
        "extra_info": {"split": split, "index": index, **fields},
    }


# ---- episodes
def shown_episode(broken: BrokenPackage, dice: Random) -> list[Message]:
    """One that repairs the first bug, and may stop before each other one."""
    repaired = 1
    while repaired < len(broken.bugs) and dice.random() >= STOPS:
        repaired += 1
    return conversation(broken, repaired)


def moves(broken: BrokenPackage, repaired: int) -> list[Move]:
    """The calls of an episode that repairs the first `repaired` bugs: for each look, repair and check; then finish."""
    return [*(move for bug in broken.bugs[:repaired] for move in repair(bug)), ("submit", {})]


def repair(bug: LineBug) -> list[Move]:
    arguments = {"command": "replace", "path": bug.file, "old_text": bug.wrong, "text": bug.right}
    return [("shell", {"command": f"cat {bug.file}"}), ("editor", arguments), ("shell", {"command": CHECK_COMMAND})]


def results(broken: BrokenPackage, repaired: int) -> list[str]:
    """Returns the tools' answers to `moves`, except to the last one."""
    checks = [*(f"{complaint(bug)}{FAILED}" for bug in broken.bugs[1:]), PASSES]
    return [text for bug, check in zip(broken.bugs[:repaired], checks, strict=False) for text in (*seen_of(bug), check)]


def seen_of(bug: LineBug) -> Iterator[str]:
    """Yields the tools' answers to looking at a bug's file and to repairing it."""
    yield bug.text(bug.wrong).rstrip()
    lines = [f"{number:6}\t{line}" for number, line in enumerate(bug.text(bug.right).splitlines(), 1)]
    yield "\n".join([f"{BOX_FOLDER}/{bug.file} now reads:", *lines])


def conversation(broken: BrokenPackage, repaired: int) -> list[Message]:
    """The episode as `agent.py` holds it with the settings of learn.yaml."""
    calls = [called(*move) for move in moves(broken, repaired)]
    answers = [{"role": "tool", "content": text} for text in results(broken, repaired)]
    messages: list[Message] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": broken.request},
    ]
    for call, answer in zip(calls[:-1], answers, strict=True):
        messages += [call, answer]
    return [*messages, calls[-1]]


def called(name: str, arguments: Mapping[str, str]) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


if __name__ == "__main__":
    main()
