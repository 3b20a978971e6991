"""Labels that say who holds a box, so that a later start ends the boxes of killed processes and no others."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping

from penstock.sandbox.owner import is_gone, machine, this_process

BOX = {"penstock": "box"}
"""On every box of ours."""
OWNER, MACHINE, PROCESS, MAKER, REQUEST, SESSION, ENDS = (
    f"penstock-{name}" for name in ("owner", "machine", "process", "maker", "request", "session", "ends")
)


def owner_labels(owner: str) -> dict[str, str]:
    """Labels of every box of one run, on whatever machine: a worker that starts again may be in a new pod."""
    return {**BOX, OWNER: label_value(owner)}


def process_labels(owner: str) -> dict[str, str]:
    """Labels of every box of this process."""
    return {**owner_labels(owner), MACHINE: machine(), PROCESS: this_process()}


def box_labels(owner: str, session_id: str, request: str, ttl_s: float) -> dict[str, str]:
    return {
        **process_labels(owner),
        SESSION: session_id,
        REQUEST: request,
        ENDS: str(int(time.time() + ttl_s)),
    }


def is_abandoned(labels: Mapping[str, str]) -> bool:
    """True if no living process holds the box: judged by its process on this machine, by its end time on others."""
    if labels.get(MACHINE) == machine():
        return is_gone(labels.get(PROCESS, ""))
    ends = labels.get(ENDS, "")
    return ends.isdigit() and int(ends) < time.time()


def label_value(text: str) -> str:
    """`text` itself if it can be a label's value, else what is left of it with a digest behind."""
    # what Kubernetes takes, the strictest of the providers
    if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", text):
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    return f"{re.sub('[^A-Za-z0-9]+', '-', text).strip('-')[:40] or 'x'}-{digest}"
