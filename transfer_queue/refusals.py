"""What an error of Redis means: not now, or no."""

from __future__ import annotations

import re
import ssl

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

from penstock.transfer_queue.queue import BadPayload, LeaseLost, QueueError, StepError, TooManyFiltered

_REFUSALS = {
    "LEASELOST": LeaseLost,
    "BADPAYLOAD": BadPayload,
    "STEP": StepError,
    "NORUN": QueueError,
    "FILTERED": TooManyFiltered,
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
_PASSING_TYPES = (
    *(OutOfMemoryError, ReadOnlyError, TryAgainError, ClusterDownError, AskError),  # redis-py cut the first word off
    *(RedisConnectionError, RedisTimeoutError, InvalidResponse, OSError),
)
_NO_RIGHTS = "The user executing the script can't"
_INSIDE_A_SCRIPT = re.compile(r": -([A-Z]+) ")
"""Redis 6.2 wraps the errors of a script's commands: ``ERR Error running script (call to f_…): … -OOM command …``."""


def check_passing(error: Exception, where: str) -> None:
    """Return where the command may be tried again; raise what it was refused with where that would not help."""
    if isinstance(error, AuthenticationError | AuthorizationError):
        raise QueueError(f"{where} refused the login: {error}") from error
    if isinstance(error.__context__, ssl.SSLCertVerificationError):
        raise QueueError(f"{where}: {error.__context__}; name its CA in the URL: ?ssl_ca_certs=FILE") from error
    if isinstance(error, _PASSING_TYPES):
        return
    if not isinstance(error, ResponseError):
        raise error
    code, _, text = str(error).partition(" ")
    inner = _INSIDE_A_SCRIPT.search(text)
    if code in _PASSING or (inner and inner[1] in _PASSING):
        return
    if code in _REFUSALS:
        raise _REFUSALS[code](text) from None
    if isinstance(error, NoPermissionError) or _NO_RIGHTS in str(error):
        raise QueueError(f"{where}: {error}; what each role may do: docs/deploy.md, Rights per role") from error
    raise QueueError(text if code == "QUEUE" else f"{where}: {error}") from error
