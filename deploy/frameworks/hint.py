"""Answers for settings of other frameworks in a recipe or override of ours: the key here, from the table of names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.deploy.frameworks.table import load_table


def verl_hint(key: str, value: Any) -> str:
    """Returns ``; verl's trainer.save_freq is trainer.checkpoint_every here``; an empty text if verl has no such key.

    `value` of a section has the keys below `key`.
    """
    table = load_table("verl")
    rows = {one: name for one in _below(key, value) if (name := table.find(one)) is not None}
    known = {one: name for one, name in rows.items() if name.kind == "copy" or table.knows(one)}
    if not known:
        return ""
    theirs, name = next(iter(known.items()))
    if len(known) == 1 and name.ours:
        return f"; verl's {theirs} is {name.our_key(theirs)} here"
    return "; a setting of verl: `penstock config from-verl` converts it, or names what to do instead"


def _below(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _below(f"{key}.{name}", inner)
    else:
        yield key
