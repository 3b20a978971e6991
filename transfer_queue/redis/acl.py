"""Rights per role: what a rollout server, an agent worker, the trainer and an onlooker may touch of one run.

Redis (7.0 or newer) checks them for every command inside a script too, so a stolen rollout server's password cannot
commit a step. It takes the KEYS of a script for written whatever the script does; therefore every role may write the
run's empty prefix ``penstock:{RUN}:``, a key that never exists, and scripts get that one as KEYS[1].

No role may send a script: one that never ends would stop Redis for all. Roles call functions, which the owner loads
(`scripts`).

| keys of the run | owner | trainer | agent | rollout | watch |
|---|---|---|---|---|---|
| `run`: identity, limits and configuration; `head` | write | read | read | read | read |
| `steps`, `trained_ahead`: versions, batches, commits | write | write | read | read | read |
| groups, episodes, leases, journals, letters, splits, counts; payloads | write | write | write | write | read |
| `servers`, `updates`, `turn*` | write | write | read | write | read |
| `once:*`, `waits`, `nothing`, `ledger` | write | write | write | write | read |

`owner` creates and drops the run: `penstock run` itself and the person behind it. SCAN, which owner, trainer and watch
may use, shows the names of other runs' keys in the same Redis, but not what is in them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.transfer_queue.errors import QueueError
from penstock.transfer_queue.redis.keys import Keys

_RUN = ("run",)
_STEPS = ("steps", "steps:*", "trained_ahead")
_EPISODES = (
    *("clock", "counters", "counts", "queue*", "admitted", "ready", "open:*", "leases", "workers", "group:*", "task:*"),
    *("journal:*", "letter*", "split*", "lengths", "failures", "in_system", "garbage", "reserved", "most_held"),
    *("asked:*", "proven"),
)
_SERVERS = ("servers", "servers_until", "updates", "turns", "turn_fence", "turn_reports")
_CALLS = ("once:*", "waits", "nothing", "ledger")
_ALL = ("*",)


@dataclass(frozen=True, slots=True)
class Rights:
    """Access rights of one role. Names are patterns below the run's prefix."""

    write: tuple[str, ...] = ()
    """Read and write."""
    read: tuple[str, ...] = ()
    payloads: str = ""
    """``~`` read and write, ``%R~`` read, empty: none."""
    commands: tuple[str, ...] = field(default=())
    """Besides `_COMMANDS`."""


RIGHTS: Mapping[str, Rights] = {
    "owner": Rights(write=_ALL, payloads="~", commands=("+scan", "+function|load")),
    "trainer": Rights(write=(*_STEPS, *_EPISODES, *_SERVERS, *_CALLS), read=_RUN, payloads="~", commands=("+scan",)),
    "agent": Rights(write=(*_EPISODES, *_CALLS), read=(*_RUN, *_STEPS, *_SERVERS), payloads="~"),
    "rollout": Rights(write=(*_EPISODES, *_SERVERS, *_CALLS), read=(*_RUN, *_STEPS), payloads="~"),
    "watch": Rights(read=_ALL, payloads="%R~", commands=("+scan",)),
}
ROLES = ("trainer", "agent", "rollout", "watch")
"""Users of a Redis that `penstock run` starts; its owner there is the default user."""
_COMMANDS = (
    *("-@all", "+@hash", "+@sortedset", "+@set", "+@list", "+@string", "+del", "+unlink", "+exists", "+type"),
    *("+expire", "+pexpire", "+persist", "+ttl", "+pttl", "+rename", "+fcall", "+time", "+ping"),
    *("-@dangerous", "-@blocking", "-lcs", "+info", "+memory|usage", "+cluster|slots"),
)
"""Data and functions, nothing whose time is a product of two lengths (LCS), nothing that stops, empties, copies or
configures a server; INFO for the check at connect."""


def role_users(run: str, passwords: Mapping[str, str]) -> list[str]:
    """A line ``user ROLE …`` of redis.conf for each role in `passwords`; only hashes of the passwords are in it.

    Raises `QueueError` for an unknown role or a run name that could match keys of other runs.
    """
    return [f"user {role} {user_rules(run, role, password)}" for role, password in passwords.items()]


def setuser_commands(run: str, passwords: Mapping[str, str]) -> list[str]:
    """``ACL SETUSER`` commands for an external Redis; its users are named ``RUN-ROLE``."""
    return [f"ACL SETUSER {run}-{role} {user_rules(run, role, password)}" for role, password in passwords.items()]


def user_rules(run: str, role: str, password: str) -> str:
    """The complete ACL rules of one user."""
    if role not in RIGHTS:
        raise QueueError(f"role {role!r}: there are {', '.join(RIGHTS)}")
    if len(password) < 8:
        raise QueueError(f"password of {role}: at least 8 characters")
    keys, rights = Keys(run), RIGHTS[role]
    patterns = [f"~{keys.index}", *(f"~{keys.index}{name}" for name in rights.write)]
    patterns += [f"%R~{keys.index}{name}" for name in rights.read]
    patterns += [f"{rights.payloads}{keys.payload('*')}"] if rights.payloads else []
    hashed = hashlib.sha256(password.encode()).hexdigest()
    return " ".join(["reset on", f"#{hashed}", *patterns, "resetchannels", *_COMMANDS, *rights.commands])
