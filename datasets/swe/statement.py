"""What a bug looks like from outside: the words of a task, taken from the tests that it breaks."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_NAMED = 3
_FAILED = re.compile(r"^FAILED (\S+)(?: - (.*))?$", re.MULTILINE)
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{4,}")


def problem_statement(package: str, killed: Sequence[str], output: str) -> str:
    """Names and messages of the last few tests that fail: pytest's summary, whose end `output` holds.

    Nothing of the file, the function or the change is told.
    """
    said = {test: message for test, message in _FAILED.findall(output)}
    named = list(killed)[-MAX_NAMED:]
    lines = [f"- {test.rpartition('::')[2]}{_told(said.get(test, ''))}" for test in named]
    more = len(killed) - len(named)
    others = [f"- and {more} more"] if more else []
    return "\n".join(
        [f"A recent change broke `{package}`: tests that passed before it fail now.", "", *lines, *others, ""]
    )


def _told(message: str) -> str:
    message = _ADDRESS.sub("0x…", message.strip())
    return f": `{message}`" if message else ""
