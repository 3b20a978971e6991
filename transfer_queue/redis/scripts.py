"""The queue's Lua scripts, one for each index operation, and the library of Redis functions that holds them all.

A script is a section ``-- script: NAME`` of a file in ``lua/``. Its first lines may say

    -- needs: run, episode    sections ``-- part: run`` and ``-- part: episode`` are put in front of it, in that order
                              (a part may itself need parts that need none)
    -- flags: no-writes       of its Redis function; parts ``full`` and ``trainer`` bring allow-oom along

A part has two halves, the second behind ``-- each call:``. The first only defines names: a library of functions runs it
once, when it is loaded, since to make some sixty Lua functions anew costs more than many a call of Redis. The second
runs at the start of every call.

Redis 7.0 or newer gets all of them as one library of functions, which the run's owner loads. They are stored in Redis's
append-only file and on its replicas, and a role needs no right but FCALL: it can run what the owner loaded and nothing
else, so that a stolen password cannot stop Redis by a script that never ends. The library is named after its contents:
several versions of Penstock use one Redis side by side. Redis 6.2 knows no functions and gets the scripts by EVALSHA.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from penstock.transfer_queue.ledger import LEDGER_KEPT
from penstock.transfer_queue.redis.keys import LAYOUT

_SECTION = re.compile(r"^-- (script|part): (\w+)\n", re.M)
_EACH_CALL = "-- each call:\n"
_LAYOUT = f"local LAYOUT, LEDGER_KEPT = '{LAYOUT}', {LEDGER_KEPT}"
_HEADER = re.compile(r"-- (needs|flags): (.*)\n")


@dataclass(frozen=True, slots=True)
class Script:
    name: str
    source: str
    """All of it, as EVAL takes it."""
    flags: tuple[str, ...] = ()
    """``allow-oom``: it makes room, so it also runs at maxmemory. ``no-writes``: it only reads."""
    body: str = ""
    """Body of its function in a library that begins with the definitions of all parts; empty: `source`."""

    @property
    def sha(self) -> str:
        """SHA-1 of the source, which is what EVALSHA names it by."""
        return hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True, slots=True)
class Library:
    """A library of Redis functions."""

    name: str
    source: str

    def function(self, script: str) -> str:
        """Returns the name by which FCALL calls a script."""
        return f"{self.name}_{script}"


@cache
def script(name: str) -> Script:
    """The script of that name, its parts in front of it. Raises `KeyError` if there is none."""
    body = _sections()["script", name]
    header = _header(body)
    needed = [
        each
        for part in header.get("needs", [])
        for each in (*_header(_sections()["part", part]).get("needs", []), part)
    ]
    halves = [_sections()["part", part].partition(_EACH_CALL) for part in dict.fromkeys(needed)]
    each_call = "\n".join([*(after for _, _, after in halves), body])
    source = "\n".join([_LAYOUT, *(definitions for definitions, _, _ in halves), each_call])
    # Scripts with these parts must also run at maxmemory.
    flags = header.get("flags", []) + (["allow-oom"] if {"full", "trainer"} & set(header.get("needs", [])) else [])
    return Script(name, source, tuple(flags), each_call)


def _header(section: str) -> dict[str, list[str]]:
    """The words of its lines ``-- needs`` and ``-- flags``."""
    words: dict[str, list[str]] = {}
    at = 0
    while line := _HEADER.match(section, at):
        words[line[1]] = [word.strip() for word in line[2].split(",")]
        at = line.end()
    return words


@cache
def library() -> Library:
    """All scripts of this version."""
    parts = [text.partition(_EACH_CALL)[0] for (kind, _), text in _sections().items() if kind == "part"]
    scripts = [script(name) for kind, name in _sections() if kind == "script"]
    return make_library(scripts, "\n".join([_LAYOUT, *parts]))


def make_library(scripts: Iterable[Script], definitions: str = "") -> Library:
    """Scripts as functions of one library that begins with `definitions`; its name ends in a hash of all."""
    ordered = sorted(scripts, key=lambda one: one.name)
    contents = "".join(f"{one.name} {one.flags}\n{one.source}\n" for one in ordered)
    name = f"penstock_{hashlib.sha256((definitions + contents).encode()).hexdigest()[:16]}"
    library = Library(name, "")
    functions = [_function(library.function(one.name), one) for one in ordered]
    return Library(name, "\n".join([f"#!lua name={name}", definitions, *functions]))


def _function(name: str, one: Script) -> str:
    flags = ", ".join(f"'{flag}'" for flag in one.flags)
    called = f"redis.register_function{{function_name='{name}', flags={{{flags}}}, callback=function(KEYS, ARGV)"
    return f"{called}\n{one.body or one.source}\nend}}"


@cache
def _sections() -> dict[tuple[str, str], str]:
    """(``script`` or ``part``, name) → source, of all files in ``lua/``; parts in the order of their use."""
    folder = files("penstock.transfer_queue").joinpath("lua")
    others = sorted(file.name for file in folder.iterdir() if file.name.endswith(".lua"))
    sections: dict[tuple[str, str], str] = {}
    for name in dict.fromkeys(["shared_run.lua", "shared_groups.lua", *others]):  # a later part may use an earlier one
        _, *pieces = _SECTION.split(folder.joinpath(name).read_text(encoding="utf-8"))
        sections |= dict(zip(zip(pieces[::3], pieces[1::3], strict=True), pieces[2::3], strict=True))
    return sections
