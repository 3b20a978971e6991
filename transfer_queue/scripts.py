"""The index operations: one Lua script each, in ``lua/``; shared pieces in ``lua/parts/``.

A script's first line may say ``-- needs: run, episode``: those parts are put in front of it, in that order.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_NEEDS = "-- needs:"


@dataclass(frozen=True, slots=True)
class Script:
    name: str
    source: str
    sha: str
    """SHA-1 of the source, which is what EVALSHA names it by."""


@cache
def script(name: str) -> Script:
    """The script of that name. Raises `FileNotFoundError` where there is none."""
    body = _read(f"{name}.lua")
    first = body.split("\n", 1)[0]
    parts = first.removeprefix(_NEEDS).split(",") if first.startswith(_NEEDS) else []
    source = "\n".join([_read("parts", f"{part.strip()}.lua") for part in parts] + [body])
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


def _read(*path: str) -> str:
    return files("penstock.transfer_queue").joinpath("lua", *path).read_text(encoding="utf-8")
