"""Two ways to write collectives that are wrong over gloo without an error are not written here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3] / "trainer"
FILES = sorted(ROOT.rglob("*.py"))
COLLECTIVES = {"sum", "max", "any", "gather", "gather_numbers", "from_rank0", "full_tensor", "all_reduce", "all_gather"}
"""Methods of `Ranks`, and torch's own."""


def cut_short(source: str) -> Iterator[int]:
    """Lines where `all` or `any` goes through a generator that calls a collective: a rank that has its answer leaves,
    and the others wait for it in the next call for ever."""
    for node in ast.walk(ast.parse(source)):
        short = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("all", "any")
        if short and node.args and isinstance(node.args[0], ast.GeneratorExp):
            called = [
                n.func.attr for n in ast.walk(node.args[0]) if isinstance(n, ast.Call) and hasattr(n.func, "attr")
            ]
            if COLLECTIVES & set(called):
                yield node.lineno


def test_the_check_sees_what_it_looks_for() -> None:
    assert list(cut_short("x = 1\nok = all(ranks.any(p) for p in parts)")) == [2]
    assert list(cut_short("ok = all([ranks.any(p) for p in parts])")) == []


def test_no_collective_is_cut_short() -> None:
    assert [(file.name, line) for file in FILES for line in cut_short(file.read_text())] == []


def test_nobody_uses_the_gather_whose_gradient_is_wrong() -> None:
    """`torch.distributed.nn` makes its buffers with the strides of the gradient that comes."""
    assert not [file for file in FILES if "torch.distributed.nn" in file.read_text()]
