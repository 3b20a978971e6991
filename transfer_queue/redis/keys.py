"""Names of the queue's keys in Redis.

    penstock:{RUN}:run                   hash: limits and configuration; the prefix alone is KEYS[1] of every script
    penstock:{RUN}:steps                 hash: version, next and committed step, announcement, batch:STEP → groups
    penstock:{RUN}:counters, counts      hashes: bytes, fences, the cursor; what ever happened
    penstock:{RUN}:queue[:SOURCE], admitted, ready, open:train, open:other, leases, letters   sorted sets
    penstock:{RUN}:group:TASK_ID         hash: a group and its members
    penstock:{RUN}:task:TASK_ID          string: its packed task
    penstock:{RUN}:journal:EPISODE       hash: nonce → position and packed entry
    penstock:payload:RUN:EPISODE@FENCE   string: a packed trajectory, see `payloads`

Index keys share the hash tag ``{RUN}``, so that a script may touch all of them in a Redis Cluster; payloads do not, so
that they may spread. The fence in a payload's name keeps a late writer from overwriting what was acknowledged.

Each index operation is one Lua script, a section ``-- script: NAME`` of a file in ``lua/``. Its first line may say
``-- needs: run, episode``: sections ``-- part: run`` and ``-- part: episode`` are put in front of it, in that order.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from penstock.transfer_queue.types import QueueError

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Keys:
    """Key names of one run. Raises `QueueError` for a name that could escape its own keys."""

    def __init__(self, run: str) -> None:
        if not _RUN_NAME.fullmatch(run):
            raise QueueError(f"run name {run!r}: letters, digits, '.', '_' and '-' only, at most 64")
        self.index = f"penstock:{{{run}}}:"
        self.run = self.index + "run"
        self.steps = self.index + "steps"
        self.counters = self.index + "counters"
        self.garbage = self.index + "garbage"
        self.updates = self.index + "updates"
        self._payload = f"penstock:payload:{run}:"

    def payload(self, name: str, piece: int = 0) -> str:
        """`name` is ``EPISODE@FENCE``."""
        return f"{self._payload}{name}/{piece}" if piece else self._payload + name

    def patterns(self) -> list[str]:
        """Glob patterns of everything that belongs to the run (names hold no glob characters)."""
        return [self.index + "*", self._payload + "*"]


LAYOUT = "2"
"""Version of the names and contents of a run's keys; a run with another one is refused. 1 had no such field."""
_NEEDS = "-- needs:"
_SECTION = re.compile(r"^-- (script|part): (\w+)\n", re.M)


@dataclass(frozen=True, slots=True)
class Script:
    name: str
    source: str
    sha: str
    """SHA-1 of the source, which is what EVALSHA names it by."""


@cache
def script(name: str) -> Script:
    """The script of that name, its parts in front of it. Raises `KeyError` where there is none."""
    body = _sections()["script", name]
    first = body.split("\n", 1)[0]
    parts = first.removeprefix(_NEEDS).split(",") if first.startswith(_NEEDS) else []
    source = "\n".join([f"local LAYOUT = '{LAYOUT}'", *(_sections()["part", part.strip()] for part in parts), body])
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


@cache
def _sections() -> dict[tuple[str, str], str]:
    """(``script`` or ``part``, name) → source, of all files in ``lua/``."""
    found: dict[tuple[str, str], str] = {}
    for file in files("penstock.transfer_queue").joinpath("lua").iterdir():
        if file.name.endswith(".lua"):
            _, *pieces = _SECTION.split(file.read_text(encoding="utf-8"))
            found |= dict(zip(zip(pieces[::3], pieces[1::3], strict=True), pieces[2::3], strict=True))
    return found
