"""Runs one test case of ``solution.py`` inside a box: its text is copied there. Standard library alone.

The first line of stdin is the job; what follows is the program's own stdin. A result is written behind a word that the
program is not told, so a program that ends early, or prints what a result looks like, has not passed.
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


def main() -> None:
    job = read_job()
    sys.setrecursionlimit(100000)
    if job["kind"] == "stdin":
        load("__main__")
        return
    result_file = os.dup(1)
    sys.stdin = io.StringIO("")
    names = load("solution")
    result: Any = True
    if job["kind"] == "call":
        result = call(names, job["given"])
    else:
        exec(job["given"], names)  # noqa: S102
    sys.stdout.flush()
    os.write(result_file, ("\n" + job["word"] + json.dumps(result) + "\n").encode())


if __name__ == "__main__":
    main()
