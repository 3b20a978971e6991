"""The shell that a session keeps: it reads its script from a pipe, one request after another, and says how each ended.

A request is one line for ``eval``, so that what the code leaves open (a quote, a loop, a here-document) ends with it.
The code sees neither pipe: its stdin is /dev/null, and the pipe of outcomes is closed for it and what it starts.
"""

from __future__ import annotations

import os

from penstock.sandbox.inside import children

OUTCOMES = 9
"""Descriptor in the shell to which it writes outcomes."""
PRELUDE = b"__status() { return $1; }\n"


def request(number: int, command: str, last_exit_code: int) -> bytes:
    """Text for the shell's pipe; ``$?`` is what the last call left."""
    quoted = "'" + command.replace("'", "'\\''") + "'"
    before = f"__status {last_exit_code} || " if last_exit_code else ""
    call = f"{before}command eval {quoted} </dev/null {OUTCOMES}>&-\n"
    answer = f"command printf '%010d%010d' {number} $? >&{OUTCOMES}\n"
    return (call + answer).encode("utf-8", "replace")


def become(requests: int, outcomes: int) -> int:
    """Body of a child that becomes the shell; returns 127 where the box has none."""
    children.restore_signals()
    os.dup2(requests, 0)
    if outcomes != OUTCOMES:
        os.dup2(outcomes, OUTCOMES)
    else:
        os.set_inheritable(outcomes, True)
    for argv in ("bash", "--noprofile", "--norc"), ("sh",):
        try:
            os.execvp(argv[0], argv)  # noqa: S606 - a shell is the point
        except FileNotFoundError:
            continue
        except OSError as error:
            os.write(2, f"{argv[0]}: {error.strerror}\n".encode("utf-8", "replace"))
            return 126
    os.write(2, b"this box has no shell\n")
    return 127
