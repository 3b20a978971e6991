"""Another value in the form of a given one: one letter or digit of it is another letter or digit."""

from __future__ import annotations

import ast
import random
import re
import string

from penstock.sandbox.swe.source import Edit, Source

_PLAIN = re.compile(r"""[bB]?(['"])(?!\1)([^'"\\\n]+)\1""")
_NUMBER = re.compile(r"\d+(\.\d+)?")
_FORMS = (string.ascii_lowercase, string.ascii_uppercase, string.digits)


def other_literal(expected: ast.expr, source: Source, dice: random.Random) -> Edit | None:
    """The edit of one leaf of a literal (a list's, a dict's, …) after which it is certainly unequal to what it was."""
    leaves = [node for node in ast.walk(expected) if isinstance(node, ast.Constant) and _may_change(node)]
    dice.shuffle(leaves)
    for leaf in leaves:
        for edit in _edits(leaf, source, dice):
            if _differs(expected, edit, source):
                return edit
    return None


def _may_change(node: ast.Constant) -> bool:
    return type(node.value) in (int, float) or (isinstance(node.value, str | bytes) and bool(node.value))


def _edits(leaf: ast.Constant, source: Source, dice: random.Random) -> list[Edit]:
    start, _ = source.span(leaf)
    text = source.text(leaf)
    if not text.isascii():
        return []
    places = _places(text)
    dice.shuffle(places)
    return [Edit(start + at, start + at + 1, _other(text[at], dice)) for at in places]


def _places(text: str) -> list[int]:
    """Of a plain number its first digit that counts, of a plain text any letter or digit; none of other forms."""
    if _NUMBER.fullmatch(text):
        counting = [at for at, sign in enumerate(text) if sign in "123456789"]
        return counting[:1] or ([0] if text == "0" else [])
    match = _PLAIN.fullmatch(text)
    return [at for at in range(match.start(2), match.end(2)) if text[at].isalnum()] if match else []


def _other(sign: str, dice: random.Random) -> str:
    """Of the same kind; a first digit never becomes a 0, which could be another form of number."""
    form = next(form for form in _FORMS if sign in form)
    return dice.choice([one for one in form if one not in (sign, "0")])


def _differs(expected: ast.expr, edit: Edit, source: Source) -> bool:
    """Read back, it is of the same kind and another value; floats by more than any tolerance."""
    start, end = source.span(expected)
    inside = Edit(edit.start - start, edit.end - start, edit.text).apply(source.data[start:end]).decode()
    try:
        before, after = _value(source.text(expected)), _value(inside)
    except (ValueError, TypeError, SyntaxError):
        return False
    return type(before) is type(after) and before != after


def _value(text: str) -> object:
    node = ast.parse(text.strip(), mode="eval").body
    return ast.literal_eval(node.args[0] if isinstance(node, ast.Call) else node)
