"""Each kind of mistake, as text in and text out."""

from __future__ import annotations

import ast

import pytest

from penstock.datasets.swe.mutators import MUTATORS, Mutation, mutations

CASES = [
    ("comparison", "return a < b", {"return a <= b"}),
    ("comparison", "return a not in b", {"return a in b"}),
    ("comparison", "return a is not b", {"return a is b"}),
    ("comparison", "return (a) == (b) != c", {"return (a) != (b) != c", "return (a) == (b) == c"}),
    ("arithmetic", "return a + b * c", {"return a - b * c", "return a + b // c"}),
    ("arithmetic", 'return "x" + b', set()),
    ("boolean", "return a and b and c", {"return a or b and c"}),
    ("negation", "return not a", {"return a"}),
    ("off by one", "return a[1]", {"return a[2]", "return a[0]"}),
    ("off by one", "return a[0]", {"return a[1]"}),
    ("off by one", "return 5000", set()),
    ("swapped arguments", "return f(a, b, c)", {"return f(b, a, c)"}),
    ("swapped arguments", "return f(a, a)", set()),
    ("wrong function", "return min(a, b)", {"return max(a, b)"}),
    ("wrong function", "return a.startswith(b)", {"return a.endswith(b)"}),
    ("wrong return", "return a", {"return None"}),
    ("wrong return", "return True", {"return False"}),
    ("wrong return", "return a, b", {"return b, a"}),
    ("wrong return", "return 'text'", set()),
    ("wrong condition", "if a(b):\n        c = 1\n    return c", {"if not a(b):\n        c = 1\n    return c"}),
    ("wrong condition", "while a > b:\n        a -= b", {"while not (a > b):\n        a -= b"}),
    ("removed branch", "if a:\n        return b\n    return c", {"return c"}),
    ("removed branch", "if a:\n        return b\n    else:\n        return c", set()),
    (
        "removed statement",
        "a.append(b)\n    a += b\n    return a",
        {"a += b\n    return a", "a.append(b)\n    return a"},
    ),
    ("removed statement", "a.append(b)", set()),
]


def of(kind: str, text: str) -> list[Mutation]:
    return [one for one in mutations("m.py", text.encode()) if one.kind == kind]


@pytest.mark.parametrize(("kind", "body", "expected"), CASES)
def test_a_mistake_of_its_kind(kind, body, expected):
    text = f"def f(a, b, c):\n    {body}\n"
    changed = {one.edit.apply(text.encode()).decode() for one in of(kind, text)}
    assert changed == {f"def f(a, b, c):\n    {one}\n" for one in expected}


def test_every_kind_has_a_case():
    assert {kind for kind, _, expected in CASES if expected} == set(MUTATORS)


SOURCE = '''\
"""A module: 1 < 2."""
LIMIT = 3


class Box:
    size: int = 4

    @property
    def full(self) -> "Literal[1]":
        """True where len(self) > 2."""
        return len(self.items) >= LIMIT  # never < LIMIT

    def take(self, count: int = 1, *, last=not True):
        def inner(x: "a < b"):
            return x - 1

        text = f"{count + 1} of {self.size}"
        assert count > 2
        return inner(count), text


async def later(é):
    return é == "ü" and é != "ö"
'''


def test_only_code_is_changed_and_all_of_it_parses():
    found = mutations("box.py", SOURCE.encode())
    for one in found:
        changed = one.edit.apply(SOURCE.encode()).decode()
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE))
    lines = {(one.function, one.line) for one in found}
    assert {name for name, _ in lines} == {"Box.full", "Box.take", "later"}
    text = SOURCE.splitlines()
    assert {text[line - 1].split("#")[0].strip() for _, line in lines} == {
        "return len(self.items) >= LIMIT",
        "return x - 1",
        "return inner(count), text",
        'return é == "ü" and é != "ö"',
    }
    assert 'return é == "ü" or é != "ö"' in {
        one.edit.apply(SOURCE.encode()).decode().splitlines()[-1].strip() for one in found
    }


def test_the_order_is_that_of_the_text_and_always_the_same():
    assert mutations("box.py", SOURCE.encode()) == mutations("box.py", SOURCE.encode())


@pytest.mark.parametrize("data", [b"def f(:\n", b"\xff\xfe", b"def f():\r\n    return 1 < 2\r\n"])
def test_what_is_no_plain_python_is_left_alone(data):
    assert mutations("m.py", data) == []
