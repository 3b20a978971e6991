"""Replies of Redis: rows of Lua scripts as the queue's types, errors as ours, and the requirements for a server.

An error is either temporary (retried by `client`) or a refusal (raised at once as the matching `QueueError`).
"""

from __future__ import annotations

import json
import re
import ssl
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    InvalidResponse,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.transfer_queue.admission import check_limits
from penstock.transfer_queue.codec.packing import pack_plain, unpack_plain
from penstock.transfer_queue.codec.trajectories import decode_journal, decode_task, outcome_from_plain
from penstock.transfer_queue.errors import (
    BadPayload,
    LeaseLost,
    NoSuchRun,
    QueueError,
    StepError,
    TooManyFiltered,
    TrainerFenced,
)
from penstock.transfer_queue.ledger import Fate, LedgerEntry, UsageReport
from penstock.transfer_queue.metrics import deciles
from penstock.transfer_queue.redis.keys import LAYOUT
from penstock.transfer_queue.redis.server_config import FLOOR_VERSION
from penstock.transfer_queue.status import EPISODE_TOTALS, Status
from penstock.transfer_queue.turns import TurnHolder, TurnReport, Turns
from penstock.transfer_queue.types import DeadLetter, JournalEntry, Lease, Limits, Origin

_POSITION = struct.Struct(">I")


def lease_from_row(row: Sequence[Any]) -> Lease:
    """Return the lease of {episode, member, attempts, fence, floor, task, journal, origin}."""
    episode, member, attempts, fence, floor, task, journal, origin = row
    lease = Lease(episode.decode(), decode_task(task), member, attempts, fence, floor, journal_from_values(journal))
    return replace(lease, origin=_origin(lease.task.task_id, origin)) if origin else lease


def _origin(task_id: str, text: bytes) -> Origin:
    """Return the origin of ``MEMBER TURN ENTRIES SAMPLED``."""
    parent, *numbers = map(int, text.split())
    return Origin(f"{task_id}#{parent}", *numbers)


def letter_from_row(row: Sequence[Any]) -> DeadLetter:
    """Return the dead letter of {episode, outcome, attempts, journal}."""
    episode, outcome, attempts, journal = row
    ending = outcome_from_plain(unpack_plain(outcome, "outcome"))
    return DeadLetter(episode.decode(), ending, attempts, journal_from_values(journal))


def journal_from_values(values: Sequence[bytes]) -> list[JournalEntry]:
    """Entries in the order they were appended: each value starts with its position, big-endian, so bytes sort so."""
    return [decode_journal(value[_POSITION.size :]) for value in sorted(values)]


def ledger_entry(member: bytes) -> LedgerEntry:
    """Return the entry of a member of the ledger: ``NUMBER KIND PACKED``."""
    number, kind, packed = member.split(b" ", 2)
    content = unpack_plain(packed, "ledger")
    if kind == b"usage":
        return LedgerEntry(int(number), UsageReport(**content))
    return LedgerEntry(
        int(number), fate=Fate[kind.decode().upper()], episodes=[*zip(content[::2], content[1::2], strict=True)]
    )


def turns_from_map(reply: Mapping[str, Any]) -> Turns:
    """Decodes the reply of scripts ``take_turn`` and ``turns``. An empty list arrives as an empty map."""
    rows = [
        TurnHolder(side, name, bool(holds), bool(waits), *rest) for side, name, holds, waits, *rest in reply["rows"]
    ]
    return Turns(reply["fence"], bool(reply["wanted"]), bool(reply["over"]), tuple(rows))


def turn_report_from_map(entry: Mapping[str, Any]) -> TurnReport:
    """Decodes an entry of the list ``turn_reports``."""
    rest = {name: entry[name] for name in ("side", "holder", "bytes", "used", "total_bytes", "total_used")}
    return TurnReport(at_s=entry["at"] / 1000, holds=bool(entry["holds"]), **rest)


def pack_record(record: Any) -> bytes:
    """A flat dataclass (ServerInfo, WeightUpdate) as a msgpack map."""
    return pack_plain(asdict(record), type(record).__name__)


def limits_to_args(limits: Limits) -> list[Any]:
    """Name, value, … as stored in the run's hash. Raises `QueueError` for invalid limits."""
    check_limits(limits)
    values = {one.name: getattr(limits, one.name) for one in fields(Limits)}
    values["lease_ttl_ms"] = round(values.pop("lease_ttl_s") * 1000)
    values["quotas"] = json.dumps(dict(limits.quotas), sort_keys=True)
    return [item for pair in values.items() for item in pair]


def other_limit(run: str, name: str, theirs: str, ours: str) -> QueueError:
    """Return the refusal of a run whose limit `name`, as `limits_to_args` has it, differs; it names the setting."""
    if name == "lease_ttl_ms":
        name, theirs, ours = "lease_ttl_s", f"{int(theirs) / 1000:g}", f"{int(ours) / 1000:g}"
    fix = f"set {name} to {theirs}"
    if name == "branches":
        fix = "set agent.forks to null" if theirs == "0" else f"set agent.forks.branches to {theirs}"
    differ = f"run {run} exists with {name} = {theirs}, not {ours}"
    return QueueError(f"{differ}; {fix} to continue it, else use another name or drop it")


def status_from_map(reply: dict[str, Any]) -> Status:
    """Return the status of the packed map of script ``status``."""
    version, step, forgotten, per_step, committed = reply["run"]  # a commit under way forgets step by step
    counts, counters = _ints(reply["counts"]), _ints(reply["counters"])
    published = max(version, forgotten)
    groups = {
        "queued": reply["queued"],
        "admitted": reply["admitted"],
        "ready": reply["ready"],
        "shipped": (step - published) * per_step - reply["lost"][0],
        "trained": (published - forgotten) * per_step - reply["lost"][1],
        "committed": counts.get("committed_groups", 0),
        "dropped_over_age": counts.get("dropped_over_age", 0),
        "filtered": counts.get("filtered_groups", 0),
        "dead": counts.get("dead_groups", 0),
        "payload_lost": counts.get("payload_lost_groups", 0),
        "submitted": counts.get("submitted", 0),
    }
    now = {"queued": counts.get("queued_episodes", 0) + reply["open"], "leased": counts.get("leased", 0)}
    return Status(
        version=version,
        step=step,
        committed_step=committed,
        groups=groups,
        episodes=now | {name: counts.get(name, 0) for name in EPISODE_TOTALS},
        bytes=counters.get("bytes", 0),
        parked=reply["parked"],
        unconsumed_bytes=counters.get("unconsumed", 0),
        waits_s={name: float(value) for name, value in _pairs(reply["waits"])},
        failures=_ints(reply["failures"]),
        workers=_ints(reply["workers"]),
        other_splits=_splits(reply["splits"]),
        ages_s={name: ms / 1000 for name, ms in reply["ages"].items() if ms >= 0},
        over_age=deciles(_buckets(reply["lengths"], "all"), _buckets(reply["lengths"], "over")),
    )


def _splits(flat: Sequence[str]) -> dict[str, dict[str, int]]:
    splits: dict[str, dict[str, int]] = {}
    for name, value in _pairs(flat):
        split, _, state = name.rpartition(" ")
        splits.setdefault(split, {"queued": 0, "leased": 0, "done": 0})[state] = int(value)
    return splits


def _buckets(flat: Sequence[str], kind: str) -> dict[int, int]:
    pairs = [(name.partition(" "), int(value)) for name, value in _pairs(flat)]
    return {int(bucket): count for (which, _, bucket), count in pairs if which == kind}


def _ints(flat: Sequence[str]) -> dict[str, int]:
    return {name: int(value) for name, value in _pairs(flat)}


def _pairs(flat: Sequence[str]) -> list[tuple[str, str]]:
    """Lua's empty table arrives as an empty list or map; both have no pairs."""
    items = list(flat)
    return list(zip(items[::2], items[1::2], strict=True))


_REFUSALS = {
    "LEASELOST": LeaseLost,
    "BADPAYLOAD": BadPayload,
    "STEP": StepError,
    "NORUN": NoSuchRun,
    "FILTERED": TooManyFiltered,
    "FENCED": TrainerFenced,
}
"""First words of the scripts' own refusals."""
_PASSING = {
    "RETRY": "a script found its payload missing: the write before it did not arrive",
    "BUSY": "another script runs",
    "MISCONF": "the disk is full or broken",
    "OOM": "memory is full",
    "LOADING": "Redis reads its file",
    "TRYAGAIN": "a slot of the cluster is moving",
    "CLUSTERDOWN": "a part of the cluster is away",
    "READONLY": "a replica, until the new master is known",
    "MASTERDOWN": "a replica without master",
    "NOREPLICAS": "too few replicas",
    "UNBLOCKED": "a master became a replica",
}
"""First words of replies that say: not now."""


class FunctionsMissing(ResponseError):
    """Redis does not know the queue's functions, and could not be given them now."""

    def __init__(self, library: str, refusal: Exception | None) -> None:
        """`refusal` is Redis's to load them; None: this login may not."""
        fix = "only the run's owner may load them: start `penstock run` of this version"
        if isinstance(refusal, OutOfMemoryError):
            fix = "memory is full: raise maxmemory until they are loaded"
        elif refusal is not None:
            fix = str(refusal)
        super().__init__(f"Redis does not know the functions {library}; {fix}")


_PASSING_TYPES = (
    FunctionsMissing,
    *(OutOfMemoryError, ReadOnlyError, TryAgainError, ClusterDownError, AskError),  # redis-py cut the first word off
    *(RedisConnectionError, RedisTimeoutError, InvalidResponse, OSError),
)


def layout_refused(layout: str) -> str:
    """The message for a run whose keys have layout `layout`."""
    return (
        f"the run's keys have layout {layout}, this version of Penstock reads layout {LAYOUT}: finish the run "
        "with the version that created it, or drop it (`penstock queue drop`) and start it again; its checkpoints stay"
    )


def check_passing(error: Exception, where: str) -> None:
    """Return if the command may be retried; otherwise raise its refusal."""
    if isinstance(error, AuthenticationError | AuthorizationError):
        raise QueueError(f"{where} refused the login: {error}") from error
    if isinstance(error.__context__, ssl.SSLCertVerificationError):
        raise QueueError(f"{where}: {error.__context__}; name its CA in the URL: ?ssl_ca_certs=FILE") from error
    if isinstance(error, _PASSING_TYPES):
        return
    if not isinstance(error, ResponseError):
        raise error
    code, _, text = str(error).partition(" ")
    # Redis 6.2 wraps the errors of a script's commands: ``ERR Error running script (call to f_…): … -OOM command …``.
    inner = re.search(r": -([A-Z]+) ", text)
    if code in _PASSING or (inner and inner[1] in _PASSING):
        return
    if code == "LAYOUT":
        raise QueueError(layout_refused(text)) from None
    if code in _REFUSALS:
        raise _REFUSALS[code](text) from None
    if isinstance(error, NoPermissionError) or "The user executing the script can't" in str(error):
        raise QueueError(f"{where}: {error}; what each role may do: page 'Launching', Rights per role") from error
    raise QueueError(text if code == "QUEUE" else f"{where}: {error}") from error


def check_server(info: Mapping[str, Any], where: str) -> None:
    """`info` is the reply to INFO. Raises `QueueError` if the server is too old or evicts keys."""
    at = f"{where} (its node on port {info['tcp_port']})" if info.get("cluster_enabled") else where
    if _version(info) < FLOOR_VERSION:
        raise QueueError(f"{at} runs Redis {info.get('redis_version')}; 6.2 or newer is needed")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise QueueError(
            f"{at} evicts keys when full (maxmemory-policy {policy}), which would lose trajectories;"
            " set it to noeviction"
        )


def knows_functions(info: Mapping[str, Any]) -> bool:
    """`info` is the reply to INFO."""
    return _version(info) >= (7, 0)  # Redis that has functions; an older one gets scripts


def _version(info: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(part) for part in str(info.get("redis_version", "0")).split(".")[:2])
