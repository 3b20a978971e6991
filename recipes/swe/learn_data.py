"""Bugs that a model of a million parameters can repair, and conversations of which most repair them wrongly or not.

    python recipes/swe/learn_data.py --out data/swe-learn

learn_package/ has one function per file. A task is that package with one operator or constant changed and the test of
the function hidden. Writes repositories/ (a folder per task), train.parquet and eval.parquet, which share no bug,
train.jsonl and eval.jsonl with the same tasks for `penstock data swe-check`, and conversations.jsonl for the cold
start: a third of them leave the right line, the others another wrong one, or none.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from random import Random
from typing import Any

from agent import SYSTEM

from penstock.datasets import Row, write_parquet

PACKAGE = Path(__file__).parent / "learn_package"
FAMILIES = (("+", "-", "*", "//"), ("<", "<=", ">", ">="))
"""Operators that are put in one another's place."""
CONSTANT_STEPS = (-2, -1, 1)
STOPS = 0.25
"""Of the conversations, those that look and repair nothing."""
GUESSES = 0.55
"""Of the others, those that write another operator or constant than the right one."""
BOX_FOLDER = "/tmp/repo"  # noqa: S108 - the box's own
TEST_COMMAND = "python3 -m unittest {test}"
"""A process per test, some 50 ms: with pytest, its canaries and its decoys a grading costs ten times as much."""
Message = Mapping[str, Any]
Move = tuple[str, Mapping[str, str]]
"""A call: the tool's name, its arguments."""


@dataclass(frozen=True, slots=True)
class LineBug:
    """One file of the package with another expression behind its `return`."""

    name: str
    file: str
    wrong: str
    right: str
    others: tuple[str, ...]
    """Further wrong expressions of this function."""

    @property
    def function(self) -> str:
        return self.file.removesuffix(".py")

    @property
    def request(self) -> str:
        return f"Repair {self.file}."

    def text(self, expression: str) -> str:
        """The file with `expression` in it."""
        return (PACKAGE / self.file).read_text(encoding="utf-8").replace(self.right, expression)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    parser.add_argument("--conversations", type=int, default=4000, help="episodes of the cold start")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    train, held_out = split_bugs(all_bugs())
    for split, bugs in {"train": train, "eval": held_out}.items():
        write_tasks(bugs, split, options.out)
    dice = Random(options.seed)
    shown = [conversation(bug, drawn(bug, dice)) for bug in dice.choices(train, k=options.conversations)]
    lines = [json.dumps({"messages": messages}) for messages in shown]
    (options.out / "conversations.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{options.out}: {len(train)} and {len(held_out)} tasks, {len(shown)} conversations")


# ---- bugs
def all_bugs() -> list[LineBug]:
    """Three of each function, in the order of the files."""
    return [bug for path in sorted(PACKAGE.glob("*.py")) for bug in bugs_of(path)]


def bugs_of(path: Path) -> Iterator[LineBug]:
    right = path.read_text(encoding="utf-8").partition("return ")[2].strip()
    wrong = wrong_expressions(right)
    for number, expression in enumerate(wrong):
        others = tuple(one for one in wrong if one != expression)
        yield LineBug(f"{path.stem}-{number}", path.name, expression, right, others)


def wrong_expressions(expression: str) -> list[str]:
    """`expression` is of the form ``name operator operand``; of a constant operand that one is changed."""
    left, operator, operand = expression.split()
    if operand.isdigit():
        return [f"{left} {operator} {int(operand) + step}" for step in CONSTANT_STEPS]
    family = next(one for one in FAMILIES if operator in one)
    return [f"{left} {other} {operand}" for other in family if other != operator]


def split_bugs(bugs: Sequence[LineBug]) -> tuple[list[LineBug], list[LineBug]]:
    """To train on and to evaluate with: of each function one bug, another one each time, is held out."""
    functions = list(dict.fromkeys(bug.function for bug in bugs))
    held_out = {f"{function}-{place % len(CONSTANT_STEPS)}" for place, function in enumerate(functions)}
    return [bug for bug in bugs if bug.name not in held_out], [bug for bug in bugs if bug.name in held_out]


# ---- tasks
def write_tasks(bugs: Sequence[LineBug], split: str, out: Path) -> None:
    fields = [task_fields(bug, write_repository(bug, out)) for bug in bugs]
    write_parquet([task_row(one, split, index) for index, one in enumerate(fields)], out / f"{split}.parquet")
    lines = "".join(json.dumps(one) + "\n" for one in fields)
    (out / f"{split}.jsonl").write_text(lines, encoding="utf-8")


def write_repository(bug: LineBug, out: Path) -> str:
    """The broken package without the test of the function; the folder's path in `out`."""
    inside = f"repositories/{bug.name}"
    hidden = shutil.ignore_patterns(f"test_{bug.file}", "__pycache__")
    shutil.copytree(PACKAGE, out / inside, ignore=hidden, dirs_exist_ok=True)
    (out / inside / bug.file).write_text(bug.text(bug.wrong), encoding="utf-8")
    return inside


def task_fields(bug: LineBug, repository: str) -> dict[str, Any]:
    """What `penstock.sandbox.swe.SweTask.from_row` reads."""
    test = f"tests/test_{bug.file}"
    hidden = (PACKAGE / test).read_text(encoding="utf-8")
    broken, repaired = bug.text(bug.wrong), bug.text(bug.right)
    return {
        "instance_id": bug.name,
        "repository": repository,
        "problem_statement": bug.request,
        "FAIL_TO_PASS": [test_id(bug.function)],
        "PASS_TO_PASS": [test_id(neighbour(bug.function))],
        "test_patch": diff(test, None, hidden),
        "patch": diff(bug.file, broken, repaired),
        "test_command": TEST_COMMAND,
    }


def test_id(function: str) -> str:
    return f"tests.test_{function}"


def neighbour(function: str) -> str:
    """The function of the next file: of the tests that no repair may break, grading runs one."""
    functions = [path.stem for path in sorted(PACKAGE.glob("*.py"))]
    return functions[(functions.index(function) + 1) % len(functions)]


def diff(path: str, old: str | None, new: str) -> str:
    """As git writes it; `old` None: the file is new."""
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
def drawn(bug: LineBug, dice: Random) -> str | None:
    """What a conversation leaves in place of the wrong expression; None: it stops without a repair."""
    if dice.random() < STOPS:
        return None
    return dice.choice(bug.others) if dice.random() < GUESSES else bug.right


def moves(bug: LineBug, new: str | None) -> list[Move]:
    """The calls of an episode that writes `new`: look, repair, finish."""
    look: Move = ("shell", {"command": f"cat {bug.file}"})
    done: Move = ("submit", {})
    if new is None:
        return [look, done]
    arguments = {"command": "replace", "path": bug.file, "old_text": bug.wrong, "text": new}
    return [look, ("editor", arguments), done]


def results(bug: LineBug, new: str | None) -> list[str]:
    """What the tools answer to `moves`, except to the last one."""
    seen = bug.text(bug.wrong).rstrip()
    if new is None:
        return [seen]
    lines = [f"{number:6}\t{line}" for number, line in enumerate(bug.text(new).splitlines(), 1)]
    return [seen, "\n".join([f"{BOX_FOLDER}/{bug.file} now reads:", *lines])]


def conversation(bug: LineBug, new: str | None) -> list[Message]:
    """The episode as `agent.py` holds it with the settings of learn.yaml."""
    calls = [called(*move) for move in moves(bug, new)]
    answers = [{"role": "tool", "content": text} for text in results(bug, new)]
    messages: list[Message] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": bug.request},
    ]
    for call, answer in zip(calls, answers, strict=False):
        messages += [call, answer]
    return [*messages, calls[-1]]


def called(name: str, arguments: Mapping[str, str]) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


if __name__ == "__main__":
    main()
