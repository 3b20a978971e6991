"""Runs one test case of ``solution.py`` inside a box: its text is copied there. Standard library alone.

The first line of stdin is the job; what follows is the program's own stdin. A result is written behind a word, so what
the program prints is not mistaken for one. The program can read this module's frames, the word included: no job may
hold an expected value.
"""

from __future__ import annotations

import io
import json
import os
import sys
from typing import Any

USUAL = "from typing import *\nimport bisect, collections, functools, heapq, itertools, math, random, re, string, sys\n"
USUAL += "from collections import *\nfrom functools import *\nfrom heapq import *\nfrom itertools import *\n"


def read_job() -> Any:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return json.loads(line)


def load(name: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": name}
    exec(USUAL, names)  # noqa: S102 - this is the box
    with open("solution.py", encoding="utf-8") as file:
        exec(compile(file.read(), "solution.py", "exec"), names)  # noqa: S102
    return names


def call(names: dict[str, Any], job: dict[str, Any]) -> Any:
    owner = names["Solution"]() if "Solution" in names else None
    function = getattr(owner, job["name"]) if hasattr(owner, job["name"]) else names[job["name"]]
    return function(*job["arguments"])


def run_steps(names: dict[str, Any], steps: list[dict[str, str]]) -> list[Any]:
    """The values of the steps that are expressions."""
    values = []
    for step in steps:
        if step["kind"] == "exec":
            exec(step["source"], names)  # noqa: S102
        else:
            values.append(encode(eval(step["source"], names)))  # noqa: S307 - this is the box
    return values


def encode(value: Any) -> Any:
    """JSON that keeps Python's types apart; an object that has no form becomes its type's name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    return {"object": type(value).__name__}


def main() -> None:
    job = read_job()
    sys.setrecursionlimit(100000)
    if job["kind"] == "stdin":
        load("__main__")
        return
    result_file = os.dup(1)
    sys.stdin = io.StringIO("")
    names = load("solution")
    result = call(names, job["given"]) if job["kind"] == "call" else run_steps(names, job["given"])
    sys.stdout.flush()
    os.write(result_file, ("\n" + job["word"] + json.dumps(result) + "\n").encode())


if __name__ == "__main__":
    main()
