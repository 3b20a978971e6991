"""Whose box it is, as labels: what a killed process left is found by them, and no living process's is touched."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from penstock.sandbox.cgroups import process_start

BOX = {"penstock": "box"}
"""On every box of ours."""
OWNER, MACHINE, PROCESS, MAKER, REQUEST, SESSION, ENDS = (
    f"penstock-{name}" for name in ("owner", "machine", "process", "maker", "request", "session", "ends")
)
_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""What Kubernetes takes, the strictest of the providers."""


def owner_labels(owner: str) -> dict[str, str]:
    """Those of every box of one run on this machine."""
    return {**BOX, OWNER: label_value(owner), MACHINE: machine()}


def process_labels(owner: str) -> dict[str, str]:
    """Those of every box of this process."""
    return {**owner_labels(owner), PROCESS: f"{os.getpid()}-{process_start(os.getpid())}"}


def box_labels(owner: str, session_id: str, request: str, ttl_s: float) -> dict[str, str]:
    return {
        **process_labels(owner),
        SESSION: session_id,
        REQUEST: request,
        ENDS: str(int(time.time() + ttl_s)),
    }


def is_abandoned(labels: Mapping[str, str]) -> bool:
    """Whether no living process holds the box: of this machine, by its process; of another, by the time of its end."""
    if labels.get(MACHINE) == machine():
        pid, _, start = labels.get(PROCESS, "").partition("-")
        return not pid.isdigit() or process_start(int(pid)) != start
    ends = labels.get(ENDS, "")
    return ends.isdigit() and int(ends) < time.time()


def label_value(text: str) -> str:
    """`text` itself where it can be a label's value, else what is left of it with a digest behind."""
    if _VALUE.fullmatch(text):
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    return f"{re.sub('[^A-Za-z0-9]+', '-', text).strip('-')[:40] or 'x'}-{digest}"


def machine() -> str:
    """Same boot and same process namespace: where a pid means the same process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return hashlib.blake2b(f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}".encode(), digest_size=8).hexdigest()
